// Linear layers for x86-64 processors with AMX-INT8. All processors with AMX-INT8 also support
// AVX-512 with VNNI. So the kernel set in kernels/select.cc uses the AVX-512 kernels for everything
// except linear layers.
#include "kernels/x86/matrix_amx.h"
#include "kernels/x86/simd_avx512.h"
// linear_by_matrices.h must be included last, because it uses the registers and vectors that the
// headers above define.
#include "kernels/linear_by_matrices.h"

namespace dlm {

extern const Kernels kAvx512Kernels;
extern decltype(Kernels::linear) const kAmxLinear;
constexpr decltype(Kernels::linear) kAmxLinear = matrix_linear<kAvx512Kernels>;

}  // namespace dlm
