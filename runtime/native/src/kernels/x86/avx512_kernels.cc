// The kernels for x86-64 with AVX-512 and VNNI.
#include "kernels/x86/simd_avx512.h"
// after the vectors that it is written over
#include "kernels/body.h"

namespace dlm {

extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = {"avx512-vnni", linear,     nvfp4_linear, experts,
                                attention,     candidates, embedding,    tied_head};

}  // namespace dlm
