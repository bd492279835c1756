// The linear layers of kernels_amx.cc over vectors of AVX2, so that tests run where no AVX-512 is: once by AMX's instructions, once
// with their registers in plain C++, where sanitizers see every access.
#ifdef DLM_AMX_EMULATED
#include "matrix_emulated.h"
#else
#include "matrix_amx.h"
#endif
#include "simd_avx2.h"
// after the registers and vectors that it is written over
#include "kernels_matrix.h"

namespace dlm {

extern const Kernels kAvx2Kernels;
#ifdef DLM_AMX_EMULATED
extern const Kernels kAmxEmulated;
const Kernels kAmxEmulated = {"amx-int8, emulated", matrix_linear<kAvx2Kernels>, nullptr, nullptr, nullptr, nullptr};
#else
extern const Kernels kAmxStandIn;
const Kernels kAmxStandIn = {"amx-int8's stand-in", matrix_linear<kAvx2Kernels>, nullptr, nullptr, nullptr, nullptr};
#endif

}  // namespace dlm
