// The vector operations that kernels/body.h needs, for AVX2 with FMA and F16C. If the compiler may
// generate 256-bit VNNI instructions, the operations use these instructions too.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {
namespace simd {

constexpr int kLanes = 8;
// Float layers compute tiles of kFloatRows rows and kFloatVectors vectors of columns. The 12
// vectors of sums and 2 vectors of weights of a tile fit the registers.
constexpr int kFloatRows = 6, kFloatVectors = 2;
constexpr int kQueryVectors = 2;  // number of query vectors that attention processes at a time
constexpr int kKeyBlock = 6;

using F = __m256;
using I = __m256i;

inline F load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, F x) { _mm256_storeu_ps(to, x); }
inline F set(float x) { return _mm256_set1_ps(x); }
inline F zero() { return _mm256_setzero_ps(); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }  // returns b if a or b is NaN
inline F min(F a, F b) { return _mm256_min_ps(a, b); }  // returns b if a or b is NaN
inline F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline I iload(const int32_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
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
inline F power_of_two(I n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, iset(127)), 23));
}

// The next functions load or store kLanes numbers, either in fp16 or as codes of one byte. Stores
// in fp16 round to the nearest number, and ties to even.
inline F load_half(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_half(uint16_t* to, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline F load_codes(const int8_t* from) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
// The next functions load kLanes numbers in bf16 or in E4M3. In E4M3, the exponent bias is 7, and
// the largest code is NaN.
inline F load_bfloat(const uint16_t* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline F load_e4m3(const uint8_t* from) {
  const __m256i codes =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m256i size = _mm256_and_si256(codes, iset(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, iset(0x80)), 24);
  const __m256i bits = _mm256_or_si256(_mm256_slli_epi32(size, 20), sign);
  const __m256i is_nan = _mm256_cmpeq_epi32(size, iset(0x7f));
  return _mm256_blendv_ps(_mm256_castsi256_ps(bits) * set(0x1p120f), set(__builtin_nanf("")),
                          _mm256_castsi256_ps(is_nan));
}

// Returns the sum of all lanes.
inline float total(F x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// For each lane, returns a if x > y, and otherwise returns b.
inline F select_greater(F x, F y, F a, F b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_GT_OQ));
}
inline I select_greater(F x, F y, I a, I b) {
  return _mm256_castps_si256(select_greater(x, y, _mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
}

// ---- Products of codes ----

inline __m256i load_bytes(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline __m128i to_shorts(I x) {
  return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
inline __m256i spread_four(const void* four_bytes) {
  int32_t bits;
  __builtin_memcpy(&bits, four_bytes, sizeof bits);
  return _mm256_set1_epi32(bits);
}

// Four signed bytes of a row, repeated in every lane.
struct Bytes {
  using Code = int8_t;
  static constexpr int kCodeOrder[] = {0, 1, 2, 3};
  using Weights = __m256i;
  using Activations = __m256i;
  static Activations spread(const Code* four) { return spread_four(four); }
  static void store_codes(Code* to, I x) {
    const __m128i shorts = to_shorts(x);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(shorts, shorts));
  }
};

// Multiplies like the class `Products`, but reads panels in which each byte contains two weights.
template <class Products>
struct Nibbles : Products {
  static constexpr int kParts = 2;
  static constexpr int32_t kWeightOffset = 8;
  template <int kPart>
  static __m256i load(const uint8_t* from) {
    const __m256i bytes = load_bytes(from);
    return _mm256_and_si256(kPart == 0 ? bytes : _mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
  }
};

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)

struct Products : Bytes {
  // Register tile: 12 vectors of sums, 2 vectors of weights.
  static constexpr int kTileRows = 6, kVectors = 2;
  static constexpr int64_t kMostInputs = 0;
  static I dot(I sum, Weights w, Activations a) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sum, w, a);
#else
    return _mm256_dpbusd_epi32(sum, w, a);
#endif
  }
};

struct Int8 : Products {
  static constexpr int kParts = 1;
  static constexpr int32_t kWeightOffset = 128;
  template <int kPart>
  static Weights load(const uint8_t* from) {
    return load_bytes(from);
  }
};

#else

// The AVX2 instruction for products of bytes adds two products to a sum of 16 bits. The sum could
// exceed 16 bits, and would then saturate. So both factors are widened to 16 bits first. This
// struct widens the even and the odd bytes of the weights separately. The codes of the rows need no
// widening, because they are already stored in 16 bits.
struct Int8 {
  static constexpr int kTileRows = 4, kVectors = 2;  // 8 vectors of sums, 4 of weights, 2 of codes
  static constexpr int kParts = 1;
  static constexpr int64_t kMostInputs = 0;
  static constexpr int32_t kWeightOffset = 128;
  using Code = int16_t;
  static constexpr int kCodeOrder[] = {0, 2, 1, 3};
  struct Weights {
    __m256i even, odd;
  };
  using Activations = Weights;
  template <int kPart>
  static Weights load(const uint8_t* from) {
    const __m256i w = load_bytes(from);
    return {_mm256_and_si256(w, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(w, 8)};
  }
  static Activations spread(const Code* four) { return {spread_four(four), spread_four(four + 2)}; }
  static I dot(I sum, Weights w, Activations a) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w.even, a.even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w.odd, a.odd));
  }
  static void store_codes(Code* to, I x) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(to_shorts(x), order));
  }
};

// Products of a four-bit number and a signed byte are so small that the sum of 16 products fits 16
// bits: 16 * 15 * 127 is 30480.
struct Products : Bytes {
  // Register tile: 12 vectors of sums, 2 vectors of weights.
  static constexpr int kTileRows = 6, kVectors = 2;
  static constexpr int64_t kMostInputs = 32;
  static I dot(I sum, Weights w, Activations a) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, a));
  }
  static I widen(I sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
};

#endif

using Int4 = Nibbles<Products>;

// A table of 16 numbers. look_up reads kLanes bytes. In each byte, the four bits from bit kShift on
// are an index into the table. look_up returns the numbers at these indices.
using Table = __m128i;
inline Table load_table(const int8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
template <int kShift>
inline F look_up(Table table, const uint8_t* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m128i nibbles = _mm_and_si128(_mm_srli_epi16(bytes, kShift), _mm_set1_epi8(15));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_shuffle_epi8(table, nibbles)));
}

}  // namespace simd
}  // namespace
