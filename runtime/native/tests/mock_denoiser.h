// A mock denoiser. Its outputs are hashes of everything that a pass reads: ids, positions,
// self-conditioning, and every byte of the cached rows. As in attention, the cached rows of a head
// may be in any order that is the same for keys and values. The mock of TensorRT runs this denoiser
// on mock device memory, and the test driver's callback engine runs it on host memory. Both give
// the same canvases only if every byte is in the right place.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace mock {

struct Layer {
  int32_t kv_heads, row_bytes;

  int64_t bytes(int32_t rows) const { return static_cast<int64_t>(kv_heads) * rows * row_bytes; }
};

struct Shape {
  std::vector<Layer> layers;
  int32_t vocab, mask, top_k;
  int32_t conditioning = 0;  // C; 0: the denoiser has no self-conditioning
  int32_t candidates = 0;    // if this is not 0, tokens from this id on are never candidates
};

struct Pass {
  int32_t tokens, cached, rows;
  const int64_t *ids, *positions, *score_rows;
  std::vector<const uint8_t*> past;  // keys and values of every layer, [kv_heads, S, row_bytes]
  // For each tensor in `past`, a pointer to the new rows, [kv_heads, T, row_bytes]. Empty if the
  // pass stores no rows.
  std::vector<uint8_t*> present;
  int32_t* top_tokens;
  float *top_probs, *top_log_odds, *entropy, *logits;  // entropy and logits may be NULL
  const float *conditioning, *temperature;             // [T, C] and [R] if C is above 0
  float* next_conditioning;                            // [R, C]; may be NULL
};

inline uint64_t mix(uint64_t state, uint64_t value) {
  state = (state ^ value) * 0x9E3779B97F4A7C15u;
  return state ^ (state >> 29);
}

inline void denoise(const Shape& shape, const Pass& pass) {
  uint64_t seen = 1;
  for (int32_t i = 0; i < pass.tokens; ++i)
    seen = mix(mix(seen, static_cast<uint64_t>(pass.ids[i])),
               static_cast<uint64_t>(pass.positions[i]));
  const auto bits = [](float number) {
    uint32_t all = 0;
    std::memcpy(&all, &number, sizeof all);
    return all;
  };
  for (int64_t i = 0; i < int64_t{pass.tokens} * shape.conditioning; ++i)
    seen = mix(seen, bits(pass.conditioning[i]));
  for (size_t layer = 0; 2 * layer < pass.past.size(); ++layer) {
    const Layer& of = shape.layers[layer];
    for (int64_t head = 0; head < of.kv_heads; ++head) {
      uint64_t rows = 0;
      for (int64_t row = head * pass.cached; row < (head + 1) * pass.cached; ++row) {
        uint64_t one = 1;
        for (const uint8_t* const past : {pass.past[2 * layer], pass.past[2 * layer + 1]})
          for (int64_t i = row * of.row_bytes; i < (row + 1) * of.row_bytes; ++i)
            one = mix(one, past[i]);
        rows += one;
      }
      seen = mix(seen, rows);
    }
  }
  for (size_t tensor = 0; tensor < pass.present.size(); ++tensor) {
    const Layer& of = shape.layers[tensor / 2];
    for (int64_t i = 0; i < of.bytes(pass.tokens); ++i) {
      const int64_t row = i / of.row_bytes % pass.tokens, head = i / of.row_bytes / pass.tokens;
      uint64_t value = mix(tensor + 100, static_cast<uint64_t>(head));
      value = mix(mix(value, static_cast<uint64_t>(pass.ids[row])),
                  static_cast<uint64_t>(pass.positions[row]));
      pass.present[tensor][i] =
          static_cast<uint8_t>(mix(value, static_cast<uint64_t>(i % of.row_bytes)) >> 40);
    }
  }
  for (int32_t r = 0; r < pass.rows; ++r) {
    const int64_t row = pass.score_rows[r];
    const uint64_t word = mix(mix(seen, static_cast<uint64_t>(pass.positions[row])),
                              static_cast<uint64_t>(pass.ids[row]));
    // A number below 1 that a float represents exactly.
    const float best = 0.5f + static_cast<float>(word >> 48) / 131072.0f;
    const int32_t choices = shape.candidates > 0 ? shape.candidates : shape.vocab - 1;
    for (int32_t k = 0; k < shape.top_k; ++k) {
      const auto token =
          static_cast<int32_t>((word + static_cast<uint64_t>(k)) % static_cast<uint64_t>(choices));
      pass.top_tokens[r * shape.top_k + k] = token < shape.mask ? token : token + 1;
      const float prob = k == 0 ? best : (1 - best) / static_cast<float>(k + 1);
      pass.top_probs[r * shape.top_k + k] = prob;
      pass.top_log_odds[r * shape.top_k + k] = std::log(prob / (1 - prob));
    }
    if (pass.entropy != nullptr) pass.entropy[r] = best - 1;
    if (pass.logits != nullptr) {
      // The logits are below 8, but those of the candidates are above.
      float* const logits = pass.logits + static_cast<int64_t>(r) * shape.vocab;
      for (int32_t v = 0; v < shape.vocab; ++v)
        logits[v] = static_cast<float>(mix(word, static_cast<uint64_t>(v)) >> 44) / 131072.0f;
      for (int32_t k = 0; k < shape.top_k; ++k)
        logits[pass.top_tokens[r * shape.top_k + k]] = static_cast<float>(8 + shape.top_k - k);
    }
    if (pass.next_conditioning != nullptr)
      for (int64_t i = 0; i < shape.conditioning; ++i)
        pass.next_conditioning[int64_t{r} * shape.conditioning + i] = static_cast<float>(
            mix(mix(word, bits(pass.temperature[r])), static_cast<uint64_t>(i)) >> 44);
  }
}

}  // namespace mock
