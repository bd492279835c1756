// Vectors of AVX2 with FMA, as kernels_body.h wants them; with VNNI in its 256-bit forms where the compiler may use it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {
namespace simd {

constexpr int kLanes = 8;
constexpr int kFloatRows = 6;     // of a product of floats, with two vectors of weights
constexpr int kQueryVectors = 2;  // of attention
constexpr int kKeyBlock = 4;

using F = __m256;
using I = __m256i;

inline F load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, F x) { _mm256_storeu_ps(to, x); }
inline F set(float x) { return _mm256_set1_ps(x); }
inline F zero() { return _mm256_setzero_ps(); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }  // b where either is NaN
inline F min(F a, F b) { return _mm256_min_ps(a, b); }  // b where either is NaN
inline F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline I iload(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void istore(int32_t* to, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
inline I iset(int32_t x) { return _mm256_set1_epi32(x); }
inline I izero() { return _mm256_setzero_si256(); }
inline I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
inline I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I imax(I a, I b) { return _mm256_max_epi32(a, b); }
inline I iand(I a, I b) { return _mm256_and_si256(a, b); }
inline I bits(F x) { return _mm256_castps_si256(x); }
inline F to_float(I x) { return _mm256_cvtepi32_ps(x); }
inline I to_int(F x) { return _mm256_cvtps_epi32(x); }  // rounds half to even
inline F power_of_two(I n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, iset(127)), 23)); }

// The lanes of `a` where x > y, else of b.
inline F select_greater(F x, F y, F a, F b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_GT_OQ)); }
inline I select_greater(F x, F y, I a, I b) {
  return _mm256_castps_si256(select_greater(x, y, _mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
}

// For both kinds of product below: what they load, and codes on their way to memory.
inline __m256i load_bytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline __m128i to_shorts(I x) { return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)

constexpr int kTileRows = 6, kProductVectors = 2;  // of an INT8 product in registers: 12 sums, 2 vectors of weights
using Code = int8_t;
constexpr int kCodeOrder[] = {0, 1, 2, 3};
constexpr int32_t kWeightOffset = 128;
using Weights = __m256i;
using Activations = __m256i;
inline Weights load_weights(const uint8_t* from) { return load_bytes(from); }
inline Activations spread(const Code* four) {
  int32_t bits;
  __builtin_memcpy(&bits, four, sizeof bits);
  return _mm256_set1_epi32(bits);
}
// Their products, four a lane, added to sum.
inline I dot(I sum, Weights w, Activations a) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sum, w, a);
#else
  return _mm256_dpbusd_epi32(sum, w, a);
#endif
}
inline void store_codes(Code* to, I x) {
  const __m128i shorts = to_shorts(x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(shorts, shorts));
}

#else

// Products of bytes go to 16 bits and saturate there, so both are widened first: a weight's even and odd bytes here, codes
// when they are stored.
constexpr int kTileRows = 4, kProductVectors = 2;  // 8 sums, 4 vectors of weights, 2 of codes
using Code = int16_t;
constexpr int kCodeOrder[] = {0, 2, 1, 3};
constexpr int32_t kWeightOffset = 128;
struct Weights {
  __m256i even, odd;
};
using Activations = Weights;
inline Weights load_weights(const uint8_t* from) {
  const __m256i w = load_bytes(from);
  return {_mm256_and_si256(w, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(w, 8)};
}
inline Activations spread(const Code* four) {
  int32_t even, odd;
  __builtin_memcpy(&even, four, sizeof even);
  __builtin_memcpy(&odd, four + 2, sizeof odd);
  return {_mm256_set1_epi32(even), _mm256_set1_epi32(odd)};
}
inline I dot(I sum, Weights w, Activations a) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w.even, a.even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(w.odd, a.odd));
}
inline void store_codes(Code* to, I x) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(to_shorts(x), order));
}
#endif

// What 16 nibbles stand for, and that of kLanes nibbles, those of `from` that are kShift bits high.
using Table = __m128i;
inline Table load_table(const int8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
template <int kShift>
inline F look_up(Table table, const uint8_t* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m128i nibbles = _mm_and_si128(_mm_srli_epi16(bytes, kShift), _mm_set1_epi8(15));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_shuffle_epi8(table, nibbles)));
}

inline void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

}  // namespace simd
}  // namespace
