// Compiles the kernels for x86-64 with AVX-512 and VNNI.
#include "kernels/x86/simd_avx512.h"
// body.h must be included after simd_avx512.h, because it uses the vector operations of
// simd_avx512.h.
#include "kernels/body.h"

namespace dlm {

extern const Kernels kAvx2Kernels, kAvx512Kernels;

}  // namespace dlm

namespace {

// If the queries of a request fill at most half a vector, this function uses vectors of half the
// width, because a processor can multiply two of them at the same time.
void attention_by_width(const dlm::CachedAttention& a, dlm::Parallel& parallel) {
  a.split(
      kLanes / 2,
      [&](const dlm::CachedAttention& few) { dlm::kAvx2Kernels.attention(few, parallel); },
      [&](const dlm::CachedAttention& many) { attention(many, parallel); });
}

}  // namespace

namespace dlm {

constexpr Kernels kAvx512Kernels = make_kernels("avx512-vnni", attention_by_width);

}  // namespace dlm
