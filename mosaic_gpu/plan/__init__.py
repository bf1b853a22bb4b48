"""From a Program to a Plan: roles, layouts, registers and asynchronous work, resources.  What emit and simulate share."""
