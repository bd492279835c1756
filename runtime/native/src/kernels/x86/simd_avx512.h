// The vector operations that kernels/body.h needs, for AVX-512 with VNNI. simd_avx2.h explains what
// they do.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {
namespace simd {

constexpr int kLanes = 16;
// Float layers compute tiles of kFloatRows rows and kFloatVectors vectors of columns. The 24
// vectors of sums and 2 vectors of weights of a tile fit the registers.
constexpr int kFloatRows = 12, kFloatVectors = 2;
constexpr int kQueryVectors = 2;  // number of query vectors that attention processes at a time
constexpr int kKeyBlock = 8;

using F = __m512;
using I = __m512i;

inline F load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, F x) { _mm512_storeu_ps(to, x); }
inline F set(float x) { return _mm512_set1_ps(x); }
inline F zero() { return _mm512_setzero_ps(); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }  // returns b if a or b is NaN
inline F min(F a, F b) { return _mm512_min_ps(a, b); }  // returns b if a or b is NaN
inline F round(F x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline I iload(const int32_t* from) { return _mm512_loadu_si512(from); }
inline void istore(int32_t* to, I x) { _mm512_storeu_si512(to, x); }
inline I iset(int32_t x) { return _mm512_set1_epi32(x); }
inline I izero() { return _mm512_setzero_si512(); }
inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
inline I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I imax(I a, I b) { return _mm512_max_epi32(a, b); }
inline I iand(I a, I b) { return _mm512_and_si512(a, b); }
inline I bits(F x) { return _mm512_castps_si512(x); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline I to_int(F x) { return _mm512_cvtps_epi32(x); }  // rounds half to even
inline F power_of_two(I n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, iset(127)), 23));
}

inline F load_half(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store_half(uint16_t* to, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline F load_codes(const int8_t* from) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline F load_bfloat(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline F load_e4m3(const uint8_t* from) {
  const __m512i codes =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m512i size = _mm512_and_si512(codes, iset(0x7f));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(codes, iset(0x80)), 24);
  const __m512i bits = _mm512_or_si512(_mm512_slli_epi32(size, 20), sign);
  return _mm512_mask_blend_ps(_mm512_cmpeq_epi32_mask(size, iset(0x7f)),
                              _mm512_castsi512_ps(bits) * set(0x1p120f), set(__builtin_nanf("")));
}

inline float total(F x) { return _mm512_reduce_add_ps(x); }

inline F select_greater(F x, F y, F a, F b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), b, a);
}
inline I select_greater(F x, F y, I a, I b) {
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), b, a);
}

// ---- Products of codes ----

// Weights are four unsigned bytes per lane. Codes of a row are four signed bytes, which are the
// same in every lane.
struct Bytes {
  // Register tile: 24 vectors of sums, 2 vectors of weights.
  static constexpr int kTileRows = 12, kVectors = 2;
  static constexpr int64_t kMostInputs = 0;
  using Code = int8_t;
  static constexpr int kCodeOrder[] = {0, 1, 2, 3};
  using Weights = __m512i;
  using Activations = __m512i;
  static Activations spread(const Code* four) {
    int32_t bits;
    __builtin_memcpy(&bits, four, sizeof bits);
    return _mm512_set1_epi32(bits);
  }
  static I dot(I sum, Weights w, Activations a) { return _mm512_dpbusd_epi32(sum, w, a); }
  static void store_codes(Code* to, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
  }
};

struct Int8 : Bytes {
  static constexpr int kParts = 1;
  static constexpr int32_t kWeightOffset = 128;
  template <int kPart>
  static Weights load(const uint8_t* from) {
    return _mm512_loadu_si512(from);
  }
};

struct Int4 : Bytes {
  static constexpr int kParts = 2;
  // A tile has 20 vectors of sums. The other registers contain the scales of a group.
  static constexpr int kTileRows = 10;
  static constexpr int32_t kWeightOffset = 8;
  template <int kPart>
  static Weights load(const uint8_t* from) {
    const __m512i bytes = _mm512_loadu_si512(from);
    return _mm512_and_si512(kPart == 0 ? bytes : _mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15));
  }
};

using Table = __m128i;
inline Table load_table(const int8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
template <int kShift>
inline F look_up(Table table, const uint8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m128i nibbles = _mm_and_si128(_mm_srli_epi16(bytes, kShift), _mm_set1_epi8(15));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_shuffle_epi8(table, nibbles)));
}

}  // namespace simd
}  // namespace
