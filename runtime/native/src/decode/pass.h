// The inputs and outputs of one pass, and each request's part of the outputs.
//
// Order of calls: prepare_pass sets the inputs; the pass maker fills buffers.score_rows;
// prepare_scores allocates the outputs; the engine runs; predictions_of returns each request's
// part. A dlm_pass points into its Buffers and is valid until they are prepared again.
//
// Scored rows form one array, [B, R]. A request's rows are contiguous from Member::first_row on, in
// the order of its positions. The rows of its second canvas start Member::apart rows later.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "decode/guidance.h"
#include "decode/request.h"
#include "engines/engine.h"

namespace dlm {

// The arrays of a pass. They are reused, so that passes of the same size allocate nothing.
struct Buffers {
  std::vector<int64_t> input_ids, position_ids, score_rows;
  std::vector<int32_t> top_tokens;
  std::vector<float> top_probs, entropy, logits;
  Proposals proposals;
  Guided guided;
};

// The most canvases in one pass. Keeps array sizes far from overflow.
constexpr int32_t kMostRequests = 4096;

// Adds its lifetime to `seconds`.
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

// The positions of one canvas that a pass runs over.
struct Piece {
  const std::vector<int32_t>* canvas;
  Range rows;
};

// Returns a pass of `batch` requests over the pieces, with only its inputs set.
dlm_pass prepare_pass(const std::vector<Piece>& pieces, int32_t batch, Buffers& buffers);

// Makes the pass score buffers.score_rows, [B, R]; allocates candidates and the outputs in `needs`.
void prepare_scores(const Denoiser& denoiser, dlm_pass& pass, const Needs& needs, Buffers& buffers);

// One request's part of the outputs. first and apart: the Member's first_row and apart.
Predictions predictions_of(const Denoiser& denoiser, const Request& request, const dlm_pass& pass,
                           size_t first, size_t apart, Buffers& buffers);

// Throws Error(DLM_UNSUPPORTED) if the engine cannot take `batch` requests in one pass.
void check_batch(const Engine& engine, int32_t batch);

// Times `repeats` passes over made-up tokens, in seconds. Each runs B = `batch` requests, `tokens`
// tokens over `cached` ones, and scores `rows` rows. A full pass fills the cache first. Calls
// before_pass before each pass, untimed. Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED).
void time_passes(const Denoiser& denoiser, const Engine& engine, Context& context, Buffers& buffers,
                 int32_t batch, int32_t tokens, int32_t cached, int32_t rows, double* seconds,
                 size_t repeats, const std::function<void()>& before_pass);

}  // namespace dlm
