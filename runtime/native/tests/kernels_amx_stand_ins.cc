// The kernels of kernels_amx.cc over vectors of AVX2, so that tests run where no AVX-512 is: once by AMX's instructions, once with
// their registers in plain C++, where sanitizers see every access.
#ifdef DLM_AMX_EMULATED
#include "matrix_emulated.h"
#else
#include "matrix_amx.h"
#endif
#include "simd_avx2.h"
// after the vectors that they are written over
#include "kernels_body.h"
#include "kernels_matrix.h"

namespace dlm {

#ifdef DLM_AMX_EMULATED
extern const Kernels kAmxEmulated;
const Kernels kAmxEmulated = {"amx-int8, emulated", matrix_linear, nvfp4_linear, attention, candidates};
#else
extern const Kernels kAmxStandIn;
const Kernels kAmxStandIn = {"amx-int8's stand-in", matrix_linear, nvfp4_linear, attention, candidates};
#endif

}  // namespace dlm
