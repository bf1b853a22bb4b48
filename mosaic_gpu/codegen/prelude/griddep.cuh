// Programmatic dependent launch.

// Waits until the kernels before this one are done and what they wrote is visible; nothing moves ahead of it.
DI void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets kernels that wait for this one begin.
DI void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
