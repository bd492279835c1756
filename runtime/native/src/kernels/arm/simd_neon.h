// The vector operations that kernels/body.h needs, for AArch64 with dot products (FEAT_DotProd).
// x86/simd_avx2.h explains what they do.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace {
namespace simd {

constexpr int kLanes = 4;
// Float layers compute tiles of kFloatRows rows and kFloatVectors vectors of columns. The 20
// vectors of sums and 4 vectors of weights of a tile fit the registers.
constexpr int kFloatRows = 5, kFloatVectors = 4;
constexpr int kQueryVectors = 4;  // number of query vectors that attention processes at a time
constexpr int kKeyBlock = 4;

using F = float32x4_t;
using I = int32x4_t;

inline F load(const float* from) { return vld1q_f32(from); }
inline void store(float* to, F x) { vst1q_f32(to, x); }
inline F set(float x) { return vdupq_n_f32(x); }
inline F zero() { return vdupq_n_f32(0.0f); }
inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // returns b if a or b is NaN
inline F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }  // returns b if a or b is NaN
inline F round(F x) { return vrndnq_f32(x); }

inline I iload(const int32_t* from) { return vld1q_s32(from); }
inline void istore(int32_t* to, I x) { vst1q_s32(to, x); }
inline I iset(int32_t x) { return vdupq_n_s32(x); }
inline I izero() { return vdupq_n_s32(0); }
inline I iadd(I a, I b) { return vaddq_s32(a, b); }
inline I isub(I a, I b) { return vsubq_s32(a, b); }
inline I imax(I a, I b) { return vmaxq_s32(a, b); }
inline I iand(I a, I b) { return vandq_s32(a, b); }
inline I bits(F x) { return vreinterpretq_s32_f32(x); }
inline F to_float(I x) { return vcvtq_f32_s32(x); }
inline I to_int(F x) { return vcvtnq_s32_f32(x); }  // rounds half to even
inline F power_of_two(I n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, iset(127)), 23));
}

inline F load_half(const uint16_t* from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}
inline void store_half(uint16_t* to, F x) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline F load_codes(const int8_t* from) {
  uint32_t bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bits)))));
}
inline F load_bfloat(const uint16_t* from) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(from)), 16));
}
inline F load_e4m3(const uint8_t* from) {
  uint32_t four;
  __builtin_memcpy(&four, from, sizeof four);
  const uint32x4_t codes = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
  const uint32x4_t size = vandq_u32(codes, vdupq_n_u32(0x7f));
  const uint32x4_t sign = vshlq_n_u32(vandq_u32(codes, vdupq_n_u32(0x80)), 24);
  const F value = vreinterpretq_f32_u32(vorrq_u32(vshlq_n_u32(size, 20), sign));
  return vbslq_f32(vceqq_u32(size, vdupq_n_u32(0x7f)), set(__builtin_nanf("")),
                   value * set(0x1p120f));
}

inline float total(F x) { return vaddvq_f32(x); }

inline F select_greater(F x, F y, F a, F b) { return vbslq_f32(vcgtq_f32(x, y), a, b); }
inline I select_greater(F x, F y, I a, I b) { return vbslq_s32(vcgtq_f32(x, y), a, b); }

// ---- Products of codes ----

// Four signed bytes per lane.
struct Bytes {
  // Register tile: 20 vectors of sums, 4 vectors of weights.
  static constexpr int kTileRows = 5, kVectors = 4;
  static constexpr int64_t kMostInputs = 0;
  using Code = int8_t;
  static constexpr int kCodeOrder[] = {0, 1, 2, 3};
  using Weights = int8x16_t;
  // Four codes and four unused bytes. The instruction in `dot` reads only the lane with the codes.
  using Activations = int8x8_t;
  static Activations spread(const Code* four) {
    uint32_t bits;
    __builtin_memcpy(&bits, four, sizeof bits);
    return vcreate_s8(bits);
  }
  static I dot(I sum, Weights w, Activations a) { return vdotq_lane_s32(sum, w, a, 0); }
  static void store_codes(Code* to, I x) {
    const int16x4_t shorts = vmovn_s32(x);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(shorts, shorts));
    vst1_lane_s32(reinterpret_cast<int32_t*>(to), vreinterpret_s32_s8(bytes), 0);
  }
};

// Each stored byte is a weight plus 128. One exclusive-or instruction subtracts 128 from each byte.
struct Int8 : Bytes {
  static constexpr int kParts = 1;
  static constexpr int32_t kWeightOffset = 0;
  template <int kPart>
  static Weights load(const uint8_t* from) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from), vdupq_n_u8(128)));
  }
};

struct Int4 : Bytes {
  static constexpr int kParts = 2;
  static constexpr int32_t kWeightOffset = 8;
  template <int kPart>
  static Weights load(const uint8_t* from) {
    const uint8x16_t bytes = vld1q_u8(from);
    return vreinterpretq_s8_u8(kPart == 0 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4));
  }
};

using Table = int8x16_t;
inline Table load_table(const int8_t* from) { return vld1q_s8(from); }
template <int kShift>
inline F look_up(Table table, const uint8_t* from) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  const uint8x8_t nibbles = vcreate_u8(bytes >> kShift & 0x0f0f0f0fu);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vqtbl1_s8(table, nibbles)))));
}

}  // namespace simd
}  // namespace
