// The kernels for x86-64 with AVX2 and FMA. Compiled a second time for processors that have
// AVX-VNNI too.
#include "kernels/x86/simd_avx2.h"
// after the vectors that it is written over
#include "kernels/body.h"

namespace dlm {

#if defined(__AVXVNNI__)
extern const Kernels kAvxVnniKernels;
const Kernels kAvxVnniKernels = {"avx-vnni", linear,     nvfp4_linear, experts,  attention,
                                 add_norm,   candidates, embedding,    tied_head};
#elif defined(__AVX512VNNI__)  // the same instruction in its older encoding, so that tests run
                               // where only that is
extern const Kernels kAvxVnniStandIn;
const Kernels kAvxVnniStandIn = {"avx-vnni's stand-in",
                                 linear,
                                 nvfp4_linear,
                                 experts,
                                 attention,
                                 add_norm,
                                 candidates,
                                 embedding,
                                 tied_head};
#else
extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = {"avx2",   linear,     nvfp4_linear, experts,  attention,
                              add_norm, candidates, embedding,    tied_head};
#endif

}  // namespace dlm
