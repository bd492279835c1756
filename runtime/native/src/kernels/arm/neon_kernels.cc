// The kernels for AArch64 with dot product instructions.
#include "kernels/arm/simd_neon.h"
// needs the vectors of the header above
#include "kernels/body.h"

namespace dlm {

extern const Kernels kNeonKernels;
constexpr Kernels kNeonKernels = make_kernels("neon-dotprod");

}  // namespace dlm
