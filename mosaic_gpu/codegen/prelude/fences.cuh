// Fences between ordinary accesses (the generic proxy) and those of TMA, wgmma and tcgen05 (the asynchronous proxy).

DI void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DI void fence_proxy_async_cluster() { asm volatile("fence.proxy.async.shared::cluster;" ::: "memory"); }

