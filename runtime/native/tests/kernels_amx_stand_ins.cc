// Compiles the linear layers of kernels/x86/amx_kernels.cc with AVX2 instead of AVX-512, so that
// more processors can run the tests. The build compiles this file twice: with AMX instructions, and
// with registers that plain C++ emulates. Sanitizers can check every memory access of the emulated
// version.
#ifdef DLM_AMX_EMULATED
#include "matrix_emulated.h"
#else
#include "kernels/x86/matrix_amx.h"
#endif
#include "kernels/x86/simd_avx2.h"
// This header uses the registers and vectors that the headers above define.
#include "kernels/linear_by_matrices.h"

namespace dlm {

extern const Kernels kAvx2Kernels;
#ifdef DLM_AMX_EMULATED
extern const Kernels kAmxEmulated;
const Kernels kAmxEmulated = {"amx-int8, emulated",
                              matrix_linear<kAvx2Kernels>,
                              nullptr,
                              nullptr,
                              nullptr,
                              nullptr,
                              nullptr,
                              nullptr,
                              nullptr,
                              nullptr};
#else
extern const Kernels kAmxStandIn;
const Kernels kAmxStandIn = {"amx-int8's stand-in",
                             matrix_linear<kAvx2Kernels>,
                             nullptr,
                             nullptr,
                             nullptr,
                             nullptr,
                             nullptr,
                             nullptr,
                             nullptr,
                             nullptr};
#endif

}  // namespace dlm
