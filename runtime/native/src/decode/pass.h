// The inputs and outputs of one pass, and what it says to each request.
//
// The order of calls: prepare_pass sets the inputs, the maker of the pass fills buffers.score_rows,
// prepare_scores makes room for the outputs, the engine runs, and predictions_of gives each request
// its part. A dlm_pass points into its Buffers: it is valid until they are prepared again.
//
// Scored rows are one array, [B, R]. A request's rows follow each other from Member::first_row on,
// in the order of its positions. Those of its second canvas follow Member::apart rows later.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "decode/guidance.h"
#include "decode/request.h"
#include "engines/engine.h"

namespace dlm {

// Inputs and outputs of passes. They are kept, so that passes of the same size allocate nothing.
struct Buffers {
  std::vector<int64_t> input_ids, position_ids, score_rows;
  std::vector<int32_t> top_tokens;
  std::vector<float> top_probs, entropy, logits;
  Proposals proposals;
  Guided guided;
};

// The most canvases of a pass: sizes of its arrays stay far from overflow.
constexpr int32_t kMostRequests = 4096;

// Adds the time that it lives to `seconds`.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Positions of a canvas that a pass runs over.
struct Piece {
  const std::vector<int32_t>* canvas;
  Range rows;
};

// A pass of `batch` requests over the pieces: only its inputs are set.
dlm_pass prepare_pass(const std::vector<Piece>& pieces, int32_t batch, Buffers& buffers);

// Makes the pass score buffers.score_rows, [B, R], with room for candidates and for `needs`.
void prepare_scores(const Denoiser& denoiser, dlm_pass& pass, const Needs& needs, Buffers& buffers);

// What the pass says to a request. first and apart: Member's first_row and apart.
Predictions predictions_of(const Denoiser& denoiser, const Request& request, const dlm_pass& pass,
                           size_t first, size_t apart, Buffers& buffers);

// Throws Error(DLM_UNSUPPORTED) if the engine takes no passes of so many requests.
void check_batch(const Engine& engine, int32_t batch);

// The seconds of each of `repeats` passes of B = `batch` requests, `tokens` over `cached` ones that
// score `rows`, on made-up tokens; a full pass fills the cache before them. before_pass is called
// before each, untimed. Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED).
void time_passes(const Denoiser& denoiser, const Engine& engine, Context& context, Buffers& buffers,
                 int32_t batch, int32_t tokens, int32_t cached, int32_t rows, double* seconds,
                 size_t repeats, const std::function<void()>& before_pass);

}  // namespace dlm
