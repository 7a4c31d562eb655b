// What the card has, by architecture. A card that is held to another's limits gets these macros
// (dakrun/kernels/runtime/held.py).
#pragma once

// Warpgroups multiply from shared memory (wgmma); else warps do (mma.sync).
#ifndef WGMMA
#define WGMMA (__CUDA_ARCH__ == 900)
#endif

// CTAs form clusters, and copies multicast to them. Cards of compute capability 12.x have no
// hardware for multicast, so that dakrun launches no clusters there. Copies then address shared::cta:
// with shared::cluster their driver is reported to set aside 3.5 GB.
#ifndef CLUSTERS
#define CLUSTERS (__CUDA_ARCH__ < 1200)
#endif
