// The unmasking loop: requests' canvases, their blocks and caches, one pass and its commits a step.
//
// Caches (arXiv:2505.22618): `none` runs the whole canvas every pass; `prefix` and `dual` run it once a block and then only
// [block start, end of canvas) or the block itself, over the keys and values of everything else. With `refresh`, only the
// first block's opening pass runs the whole canvas: a later one reaches back to the start of the block decided before it, or
// `refresh` tokens if that is farther, so that no kept row is of a mask token whose place has been filled since.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine.h"
#include "error.h"
#include "policy.h"

namespace dlm {

// What the loop knows of a denoiser, checked.
struct Denoiser {
  int32_t vocab_size, mask_token_id, max_canvas_length, top_k, shift;
  bool has_cache;
  CacheShape cache;  // at least one layer, and of no use where there is none
  std::vector<int32_t> eos_token_ids;
};

// Inputs and outputs of passes, which outlive a batch, so that the next one of the same size allocates nothing.
struct Buffers {
  std::vector<int64_t> input_ids, position_ids, score_rows;
  std::vector<int32_t> top_tokens, order;
  std::vector<float> top_probs, entropy;
  std::vector<double> scores;
};

// The most requests that a pass takes: sizes of its arrays stay far from overflow.
constexpr int32_t kMostRequests = 4096;

// What a pass says of a request's scored rows: of each the candidates, top_k of them, and the entropy if it was asked for.
struct Predictions {
  const int32_t* tokens;
  const float *probs, *entropy;
};

// A request's canvas: which of its positions passes score, and what their candidates commit. It makes no passes itself.
class Request {
 public:
  struct Range {
    int32_t first, last;
    int32_t tokens() const { return last - first; }
  };
  struct Block {
    int32_t start, end, undecided, steps;  // undecided: at its start
    Range opening, rest;                   // what its first pass and its others run over
  };

  // undecided says for each position of the canvas whether a token is wanted there, whatever token passes shall see until then;
  // ids and lengths are checked already. steps > 0 plans that many passes for the whole generation. name: what its errors start
  // with, such as "request 3: ". Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED).
  Request(const Denoiser& denoiser, const Policy& policy, std::vector<int32_t> canvas, std::vector<uint8_t> undecided,
          int32_t steps, std::string name = "");

  // Throws Error(DLM_INVALID_ARGUMENT) if the request may need a pass that the engine does not take.
  void check_limits(const Engine& engine) const;

  // Whether both can be in one batch: canvases of one length, and over a cache the same blocks to fill.
  bool fits(const Request& other) const;

  bool done() const { return block_ == blocks_.size(); }
  size_t block_number() const { return block_; }
  const Block& block() const { return blocks_[block_]; }
  int32_t block_step() const { return block_step_; }
  const std::string& name() const { return name_; }
  const std::vector<int32_t>& canvas() const { return canvas_; }
  const std::vector<uint8_t>& undecided() const { return undecided_; }  // by position, 1 or 0
  int32_t nfe() const { return nfe_; }
  dlm_step view() const;

  // Finds the positions of the block that are undecided, which the next pass scores; returns how many they are.
  size_t find_positions();
  const std::vector<int32_t>& positions() const { return positions_; }  // ascending

  // Commits after a pass that scored what find_positions found. Throws Error(DLM_ENGINE_FAILED) for impossible candidates.
  void step(const Predictions& predictions, Buffers& buffers);

 private:
  void score(const Predictions& predictions, Buffers& buffers) const;
  void commit(const Predictions& predictions, Buffers& buffers);
  void finish_block();

  const Denoiser& denoiser_;
  Policy policy_;
  std::string name_;
  std::vector<int32_t> canvas_;
  std::vector<uint8_t> undecided_;
  std::vector<bool> is_given_;
  std::vector<Block> blocks_;
  size_t block_ = 0;
  int32_t block_step_ = 0, nfe_ = 0;
  std::vector<int32_t> positions_;  // what find_positions found
  std::vector<int32_t> guess_;
  std::vector<float> score_;
  int32_t committed_ = 0, view_start_ = 0, view_end_ = 0;
};

// Requests of one policy that go through their passes together; one alone is a batch too.
//
// Over a cache they go in lockstep, as its rows are moved for all of them alike: a request that has finished a block waits for
// the slowest, its rows computed and ignored. A request that is done leaves at the next full pass that fills the cache. Without
// a cache each goes at its own pace and leaves when it is done. A request gets what it would get alone, after as many passes.
class Batch {
 public:
  // All fit each other; there is at least one. policy: theirs.
  Batch(const Denoiser& denoiser, const Policy& policy, std::vector<Request> requests)
      : denoiser_(denoiser), policy_(policy), requests_(std::move(requests)) {}

  // One pass and its commits; nothing once done. Throws what the context throws; the batch is then unusable.
  void step(Context& context, Buffers& buffers);

  bool done() const;
  const std::vector<Request>& requests() const { return requests_; }
  const dlm_stats& stats() const { return stats_; }

 private:
  // A request that takes part in a pass, and which of the batch's rows is its.
  struct Turn {
    Request* request;
    size_t row;
  };

  std::vector<Turn> find_turns();
  dlm_pass run_pass(const std::vector<Turn>& turns, Context& context, Buffers& buffers);

  const Denoiser& denoiser_;
  Policy policy_;
  std::vector<Request> requests_;
  std::vector<size_t> rows_;  // by row of the passes: whose it is
  dlm_stats stats_{};
};

// Throws Error(DLM_UNSUPPORTED) if the engine takes no passes of so many requests.
void check_batch(const Engine& engine, int32_t batch);

// Calls body; its errors then start with `name`.
template <class Body>
void with_name(const std::string& name, Body body) {
  try {
    body();
  } catch (const Error& error) {
    throw Error(error.status(), name + error.what());
  }
}

// Fills the pass's inputs for positions [first, last) of the canvases; scored rows and outputs are left unset.
dlm_pass prepare_pass(const std::vector<const std::vector<int32_t>*>& canvases, int32_t first, int32_t last, Buffers& buffers);

// Makes the pass score the rows in buffers.score_rows, [B, R], and gives it room for their candidates.
void prepare_scores(const Denoiser& denoiser, dlm_pass& pass, Buffers& buffers);

// The seconds of each of `repeats` passes of B = `batch` requests, `tokens` over `cached` ones that score `rows`, on made-up
// tokens; a full pass fills the cache before them. before_pass is called before each, untimed. Throws
// Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED), and what the context and before_pass throw.
void time_passes(const Denoiser& denoiser, const Engine& engine, Context& context, Buffers& buffers, int32_t batch,
                 int32_t tokens, int32_t cached, int32_t rows, double* seconds, size_t repeats,
                 const std::function<void()>& before_pass);

}  // namespace dlm
