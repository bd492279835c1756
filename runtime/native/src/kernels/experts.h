// The kernel for mixtures of experts. Each row is routed to some of the experts. The kernel groups
// the rows by expert, and runs the expert's linear layers on each group. Then it adds up the
// weighted results of each row.
//
// The linear layers use the code for quantised layers (kernels/linear.h) or for float layers
// (kernels/nvfp4.h). The tasks of all experts run at the same time, so the threads wait for each
// other four times per mixture, and not four times per expert.
#pragma once

#include "kernels/linear.h"
#include "kernels/nvfp4.h"

namespace {

// An fp32 layer, as a template argument for run_product (kernels/linear.h). Unlike Product, it does
// not quantise rows.
struct FloatProduct {
  static constexpr int64_t kTogether = kTilesTogether;

  const dlm::Linear& layer;
  Tiles tiles;

  FloatProduct(const dlm::Linear& of, void*) : layer(of), tiles(of.rows, simd::kFloatRows) {}
  void quantise(int64_t) const {}

  // Multiplies tiles of rows by panel `number` of a weight matrix. `first` is the first tile, and
  // `last` - 1 is the last. The panel is [K, 32] floats.
  void multiply(size_t weight, int64_t number, int64_t first, int64_t last) const {
    float results[2][kTogether * simd::kFloatRows * kPanel];
    const int64_t K = layer.inputs, top = tiles.start(first), rows = tiles.start(last) - top;
    for (size_t i = 0; i < (layer.is_gated() ? 2 : 1); ++i) {
      const auto* const panel =
          reinterpret_cast<const float*>(layer.weights[weight + i].panels) + number * K * kPanel;
      sum_floats(layer.x, K, tiles, first, last, results[i],
                 [&](int64_t k, int64_t) { return panel + k * kPanel; });
    }
    if (layer.is_gated()) gate(layer.activation, results[0], results[1], rows * kPanel);
    const int64_t all = layer.weights[weight].columns;
    copy_panel(results[0], rows, number, all, layer.outputs[weight] + top * all);
  }
};

// The scratch memory of a mixture: the rows grouped by expert, the intermediate results, and the
// groups. A slot is a pair of a row and one of the experts that were chosen for this row.
struct Routed {
  const dlm::Experts& mixture;
  int64_t slots;             // number of slots: rows * active
  float *inputs, *hidden;    // [slots, K], [slots, M]
  float* results;            // [slots, K], not yet multiplied by the experts' weights
  int64_t* place;            // [slots]: index of each slot in the order of the groups
  dlm::ExpertGroup* groups;  // one group for each expert that was chosen for at least one row
  int64_t count;
  char* codes;  // memory for the codes of quantised rows

  Routed(const dlm::Experts& of, void* scratch)
      : mixture(of), slots(of.rows * of.active), count(0) {
    place = static_cast<int64_t*>(scratch);
    groups = reinterpret_cast<dlm::ExpertGroup*>(place + slots);
    inputs = reinterpret_cast<float*>(groups + of.count);
    hidden = inputs + slots * of.inputs;
    results = hidden + slots * of.hidden;
    codes = reinterpret_cast<char*>(results + slots * of.inputs);
    int64_t next = 0;
    for (int64_t expert = 0; expert < of.count; ++expert) groups[expert] = {expert, 0, 0};
    for (int64_t slot = 0; slot < slots; ++slot) ++groups[of.chosen[slot]].rows;
    for (int64_t expert = 0; expert < of.count; ++expert) {
      groups[expert].start = next;
      next += groups[expert].rows;
    }
    // Within each group, the rows stay in their original order. This loop advances `start` to the
    // end of each group, and the next loop sets it back.
    for (int64_t slot = 0; slot < slots; ++slot) place[slot] = groups[of.chosen[slot]].start++;
    for (int64_t expert = 0; expert < of.count; ++expert) {
      if (groups[expert].rows == 0) continue;
      groups[count] = groups[expert];
      groups[count].start -= groups[count].rows;
      ++count;
    }
  }

  // One step of the mixture: either the gate and up layers together, or the down layer.
  struct Layer {
    dlm::LinearWeight weights[2];
    float* outputs[2];
    dlm::Linear layer;
  };
  void layer_of(const dlm::ExpertGroup& group, bool is_gated, Layer& made) const {
    const dlm::Experts& m = mixture;
    const int64_t K = m.inputs_of(is_gated), N = m.inputs_of(!is_gated);
    const auto weight = [&](const dlm::ExpertWeights& of) {
      return dlm::LinearWeight{
          of.panels + group.expert * m.panel_bytes(K, N),
          static_cast<const char*>(of.scales) + group.expert * m.scale_bytes(K, N), N};
    };
    made.weights[0] = weight(is_gated ? m.gate : m.down);
    if (is_gated) made.weights[1] = weight(m.up);
    made.outputs[0] = (is_gated ? hidden : results) + group.start * N;
    made.layer = {(is_gated ? inputs : hidden) + group.start * K,
                  group.rows,
                  K,
                  made.weights,
                  made.outputs,
                  is_gated ? size_t{2} : size_t{1},
                  is_gated ? m.activation : dlm::Activation::none,
                  m.group_size};
  }
};

template <class Product>
void run_groups(const Routed& routed, bool is_gated, dlm::Parallel& parallel) {
  const dlm::Experts& m = routed.mixture;
  const int64_t K = m.inputs_of(is_gated), N = m.inputs_of(!is_gated);
  const auto with = [&](const dlm::ExpertGroup& group, auto body) {
    typename Routed::Layer made;
    routed.layer_of(group, is_gated, made);
    body(Product(made.layer, routed.codes + group.start * dlm::Experts::code_bytes(K)));
  };
  const auto quantise = [&](int64_t i) {
    with(routed.groups[i], [](const Product& product) {
      for (int64_t tile = 0; tile < product.tiles.count; ++tile) product.quantise(tile);
    });
  };
  if (m.format != dlm::ExpertFormat::fp32) {
    if (routed.slots * K < kFewNumbers)
      for (int64_t i = 0; i < routed.count; ++i) quantise(i);
    else
      parallel.each(routed.count, quantise);
  }
  const int64_t panels = dlm::padded_columns(N) / kPanel;
  const int64_t chunk = most(1, least(8, panels * routed.count / kTasks)),
                chunks = (panels + chunk - 1) / chunk;
  parallel.each(routed.count * chunks, [&](int64_t i) {
    const int64_t from = i % chunks * chunk;
    with(routed.groups[i / chunks], [&](const Product& product) {
      for (int64_t n = from; n < least(from + chunk, panels); ++n)
        for (int64_t first = 0; first < product.tiles.count; first += Product::kTogether)
          product.multiply(0, n, first, least(first + Product::kTogether, product.tiles.count));
    });
  });
}

template <class Product>
void run_experts(const dlm::Experts& mixture, void* scratch, dlm::Parallel& parallel) {
  const Routed routed(mixture, scratch);
  const int64_t K = mixture.inputs, active = mixture.active;
  const auto each_row = [&](auto body) {
    if (routed.slots * K < kFewNumbers)
      for (int64_t row = 0; row < mixture.rows; ++row) body(row);
    else
      parallel.each(mixture.rows, body);
  };
  each_row([&](int64_t row) {
    for (int64_t slot = row * active; slot < (row + 1) * active; ++slot)
      __builtin_memcpy(routed.inputs + routed.place[slot] * K, mixture.x + row * K,
                       K * sizeof(float));
  });
  run_groups<Product>(routed, true, parallel);
  run_groups<Product>(routed, false, parallel);
  each_row([&](int64_t row) {
    float* const y = mixture.y + row * K;
    for (int64_t k = 0; k < K; ++k) y[k] = 0;
    for (int64_t slot = row * active; slot < (row + 1) * active; ++slot) {
      const float* const result = routed.results + routed.place[slot] * K;
      const float weight = mixture.weights[slot];
      const F share = simd::set(weight);
      int64_t k = 0;
      for (; k + kLanes <= K; k += kLanes)
        simd::store(y + k, simd::fma(share, simd::load(result + k), simd::load(y + k)));
      for (; k < K; ++k) y[k] += weight * result[k];
    }
  });
}

inline void experts(const dlm::Experts& mixture, void* scratch, dlm::Parallel& parallel) {
  for (int64_t row = 0; row < mixture.rows; row += dlm::Experts::kRowsTogether) {
    dlm::Experts some = mixture;
    some.rows = least(dlm::Experts::kRowsTogether, mixture.rows - row);
    some.x += row * mixture.inputs, some.y += row * mixture.inputs;
    some.chosen += row * mixture.active, some.weights += row * mixture.active;
    if (mixture.format == dlm::ExpertFormat::fp32)
      run_experts<FloatProduct>(some, scratch, parallel);
    else if (mixture.format == dlm::ExpertFormat::int8)
      run_experts<Product<simd::Int8>>(some, scratch, parallel);
    else
      run_experts<Product<simd::Int4>>(some, scratch, parallel);
  }
}

}  // namespace
