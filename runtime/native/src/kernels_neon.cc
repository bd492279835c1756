// The kernels for AArch64 with dot products.
#include "simd_neon.h"
// after the vectors that it is written over
#include "kernels_body.h"

namespace dlm {

extern const Kernels kNeonKernels;
const Kernels kNeonKernels = {"neon-dotprod", linear, nvfp4_linear, experts, attention, candidates, embedding};

}  // namespace dlm
