// Looks up rows of an embedding table. The table is stored as the weight matrix of a tied head, in
// panels. So the row of a token is a column of a panel.
#pragma once

#include "kernels/common.h"

namespace {

// Looks up one row of a table in INT8 panels. Multiplies the codes by the scale of the column.
inline void look_up_int8(const dlm::Embedding& table, int64_t id, float* y) {
  const int64_t panel = id / kPanel, column = id % kPanel;
  const uint8_t* code = table.panels + panel * table.hidden * kPanel + column * kDot;
  const float scale = static_cast<const float*>(table.scales)[id];
  for (int64_t k = 0; k < table.hidden; k += kDot, code += kPanel * kDot)
    for (int64_t i = 0; i < kDot; ++i) y[k + i] = static_cast<float>(code[i] - 128) * scale;
}

// Looks up one row of a table in INT4 panels. Multiplies the codes by the scales of their groups.
inline void look_up_int4(const dlm::Embedding& table, int64_t id, float* y) {
  const int64_t panel = id / kPanel, column = id % kPanel,
                groups = dlm::groups_of(table.hidden, table.group_size);
  const uint8_t* code = table.panels + panel * (table.hidden / 2) * kPanel + column * kDot;
  const uint16_t* stored =
      static_cast<const uint16_t*>(table.scales) + panel * groups * kPanel + column;
  for (int64_t start = 0; start < table.hidden; start += table.group_size, stored += kPanel) {
    uint16_t half[kLanes] = {*stored};
    float scale[kLanes];
    simd::store(scale, simd::load_half(half));
    const int64_t end = least(start + table.group_size, table.hidden);
    for (int64_t k = start; k < end; k += dlm::kPairs, code += kPanel * kDot)
      for (int64_t i = 0; i < kDot; ++i) {
        y[k + i] = static_cast<float>((code[i] & 15) - 8) * scale[0];
        y[k + kDot + i] = static_cast<float>((code[i] >> 4) - 8) * scale[0];
      }
  }
}

inline void embedding(const dlm::Embedding& table, dlm::Parallel& parallel) {
  constexpr int64_t kTogether = 64;  // number of tokens per task
  const int64_t tasks = (table.tokens + kTogether - 1) / kTogether;
  parallel.each(tasks, [&](int64_t task) {
    const int64_t first = task * kTogether, last = least(first + kTogether, table.tokens);
    for (int64_t t = first; t < last; ++t) {
      float* const y = table.y + t * table.hidden;
      if (table.group_size == 0)
        look_up_int8(table, table.ids[t], y);
      else
        look_up_int4(table, table.ids[t], y);
    }
  });
}

}  // namespace
