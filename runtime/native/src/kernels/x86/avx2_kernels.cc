// The kernels for x86-64 with AVX2 and FMA. Compiled again for processors that also have AVX-VNNI.
#include "kernels/x86/simd_avx2.h"
// needs the vectors defined above
#include "kernels/body.h"

namespace dlm {

#if defined(__AVXVNNI__)
extern const Kernels kAvxVnniKernels;
const Kernels kAvxVnniKernels = {"avx-vnni", linear,     nvfp4_linear, experts,  attention,
                                 add_norm,   candidates, embedding,    tied_head};
#elif defined(__AVX512VNNI__)  // the same instruction in its older encoding, for tests on
                               // processors that have only that
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
