// Compiles the kernels for x86-64 with AVX2 and FMA. The build also compiles this file a second
// time, for processors that also support AVX-VNNI.
#include "kernels/x86/simd_avx2.h"
// body.h must be included after simd_avx2.h, because it uses the vector operations of simd_avx2.h.
#include "kernels/body.h"

namespace dlm {

#if defined(__AVXVNNI__)
extern const Kernels kAvxVnniKernels;
constexpr Kernels kAvxVnniKernels = make_kernels("avx-vnni");
#elif defined(__AVX512VNNI__)
// The AVX-VNNI kernels, compiled with the AVX-512 encoding of the VNNI instruction. Tests use this
// kernel set on processors that support only this encoding.
extern const Kernels kAvxVnniStandIn;
constexpr Kernels kAvxVnniStandIn = make_kernels("avx-vnni's stand-in");
#else
extern const Kernels kAvx2Kernels;
constexpr Kernels kAvx2Kernels = make_kernels("avx2");
#endif

}  // namespace dlm
