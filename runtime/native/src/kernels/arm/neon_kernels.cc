// The kernels for AArch64 with dot products.
#include "kernels/arm/simd_neon.h"
// needs the vectors defined above
#include "kernels/body.h"

namespace dlm {

extern const Kernels kNeonKernels;
constexpr Kernels kNeonKernels = make_kernels("neon-dotprod");

}  // namespace dlm
