// Compiles the kernels for AArch64 processors with dot product instructions.
#include "kernels/arm/simd_neon.h"
// kernels/body.h uses the vector operations of simd_neon.h, so it must come after this header.
#include "kernels/body.h"

namespace dlm {

extern const Kernels kNeonKernels;
constexpr Kernels kNeonKernels = make_kernels("neon-dotprod");

}  // namespace dlm
