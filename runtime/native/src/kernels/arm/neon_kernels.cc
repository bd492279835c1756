// The kernels for AArch64 with dot products.
#include "kernels/arm/simd_neon.h"
// needs the vectors defined above
#include "kernels/body.h"

namespace dlm {

extern const Kernels kNeonKernels;
const Kernels kNeonKernels = {"neon-dotprod", linear,     nvfp4_linear, experts,  attention,
                              add_norm,       candidates, embedding,    tied_head};

}  // namespace dlm
