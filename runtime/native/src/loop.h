// The unmasking loop: a request's canvas, its blocks and caches, one pass and one commit a step.
//
// Caches (arXiv:2505.22618): `none` runs the whole canvas every pass; `prefix` and `dual` run it once a block and then only
// [block start, end of canvas) or the block itself, over the keys and values of everything else. Attention is full, so the
// order of cached rows does not matter: a pass gets the rows before and behind it side by side.
#pragma once

#include <cstdint>
#include <vector>

#include "engine.h"
#include "policy.h"

namespace dlm {

// What the loop knows of a denoiser, checked.
struct Denoiser {
  int32_t vocab_size, mask_token_id, max_canvas_length, layers, kv_heads, head_size, top_k, kv_element_bytes, shift;
  bool has_cache;
  std::vector<int32_t> eos_token_ids;

  CacheShape cache() const { return {layers, kv_heads, head_size, kv_element_bytes}; }
};

// Inputs and outputs of passes, which outlive a request, so that the next one of the same size allocates nothing.
struct Buffers {
  std::vector<int64_t> input_ids, position_ids, score_rows;
  std::vector<int32_t> top_tokens, order;
  std::vector<float> top_probs, entropy;
  std::vector<double> scores;
};

class Request {
 public:
  // The canvas holds the given tokens and a mask token wherever one is wanted; ids and length are checked already.
  // steps > 0 plans that many passes for the whole generation. Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED).
  Request(const Denoiser& denoiser, const Policy& policy, std::vector<int32_t> canvas, int32_t steps);

  // Throws Error(DLM_INVALID_ARGUMENT) if the request may need a pass that the engine does not take.
  void check_limits(const Engine& engine) const;

  // One pass and its commit; nothing once done. Throws what the context throws; the request is then unusable.
  void step(Context& context, Buffers& buffers);

  bool done() const { return block_ == blocks_.size(); }
  const std::vector<int32_t>& canvas() const { return canvas_; }
  const dlm_stats& stats() const { return stats_; }
  dlm_step view() const;

 private:
  struct Block {
    int32_t start, end, masked, steps;  // masked: at its start
  };
  struct Range {
    int32_t first, last;
  };

  Range range(const Block& block, bool is_full) const;
  void run_pass(Context& context, Buffers& buffers, Range range, bool is_full);
  void score(Buffers& buffers, bool is_full);
  void commit(Buffers& buffers);
  void finish_block();

  const Denoiser& denoiser_;
  Policy policy_;
  std::vector<int32_t> canvas_;
  std::vector<bool> is_given_;
  std::vector<Block> blocks_;
  size_t block_ = 0;
  int32_t block_step_ = 0;
  bool past_is_current_ = false;
  std::vector<int32_t> positions_;  // still masked in the block, ascending: the scored rows of the pass
  std::vector<int32_t> guess_;
  std::vector<float> score_;
  int32_t committed_ = 0, view_start_ = 0, view_end_ = 0;
  dlm_stats stats_{};
};

// Fills the pass's inputs for positions [first, last) of a canvas; scored rows and outputs are left unset.
dlm_pass prepare_pass(const std::vector<int32_t>& canvas, int32_t first, int32_t last, Buffers& buffers);

// Makes the pass score the rows in buffers.score_rows, and gives it room for their candidates.
void prepare_scores(const Denoiser& denoiser, dlm_pass& pass, Buffers& buffers);

// The seconds of each of `repeats` passes of `tokens` over `cached` ones that score `rows`, on made-up tokens; a full pass
// fills the cache before them. Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED), and what the context throws.
void time_passes(const Denoiser& denoiser, const Engine& engine, Context& context, Buffers& buffers, int32_t tokens,
                 int32_t cached, int32_t rows, double* seconds, size_t repeats);

}  // namespace dlm
