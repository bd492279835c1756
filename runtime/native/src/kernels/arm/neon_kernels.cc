// Compiles the kernels for AArch64 processors with dot product instructions.
#include "kernels/arm/simd_neon.h"
// body.h must be included after simd_neon.h, because it uses the vector operations of simd_neon.h.
#include "kernels/body.h"

namespace dlm {

extern const Kernels kNeonKernels;
constexpr Kernels kNeonKernels = make_kernels("neon-dotprod");

}  // namespace dlm
