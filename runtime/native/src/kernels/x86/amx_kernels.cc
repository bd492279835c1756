// The kernels for x86-64 with AMX for bytes: linear layers use its registers, all else AVX-512 with
// VNNI, which all such processors have.
#include "kernels/x86/matrix_amx.h"
#include "kernels/x86/simd_avx512.h"
// needs the registers and vectors defined above
#include "kernels/linear_by_matrices.h"

namespace dlm {

extern const Kernels kAvx512Kernels, kAmxKernels;
const Kernels kAmxKernels = {"amx-int8",
                             matrix_linear<kAvx512Kernels>,
                             kAvx512Kernels.nvfp4_linear,
                             kAvx512Kernels.experts,
                             kAvx512Kernels.attention,
                             kAvx512Kernels.add_norm,
                             kAvx512Kernels.candidates,
                             kAvx512Kernels.embedding,
                             kAvx512Kernels.tied_head};

}  // namespace dlm
