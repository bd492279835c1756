// The kernels for x86-64 with AMX for bytes: linear layers by its registers, the rest as with AVX-512 and VNNI, which all such
// processors have.
#include "matrix_amx.h"
#include "simd_avx512.h"
// after the vectors that they are written over
#include "kernels_body.h"
#include "kernels_matrix.h"

namespace dlm {

extern const Kernels kAmxKernels;
const Kernels kAmxKernels = {"amx-int8", matrix_linear, nvfp4_linear, attention, candidates};

}  // namespace dlm
