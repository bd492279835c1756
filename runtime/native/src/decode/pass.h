// The arrays of one pass: its inputs, its outputs, and each request's part of the outputs.
//
// A pass is prepared and run in this order. prepare_pass sets the inputs. The pass maker fills
// buffers.score_rows. prepare_scores allocates the outputs. The engine runs the pass.
// predictions_of returns each request's part of the outputs. A dlm_pass points into its Buffers. It
// is valid until the Buffers are used for another pass.
//
// All scored rows form one array, [B, R]. The rows of a request are contiguous, in the order of its
// positions, and start at Member::first_row. With guidance, the rows of its second canvas start
// Member::apart rows later.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "decode/guidance.h"
#include "decode/request.h"
#include "engines/engine.h"

namespace dlm {

// The arrays of a pass. They are reused, so that a pass of the same size allocates nothing.
struct Buffers {
  std::vector<int64_t> input_ids, position_ids, score_rows;
  std::vector<int32_t> top_tokens;
  std::vector<float> top_probs, entropy, logits;
  Proposals proposals;
  Guided guided;
};

// The most canvases in one pass. The limit keeps array sizes far from overflow.
constexpr int32_t kMostRequests = 4096;

// Measures the time until the object is destroyed, and adds it to `seconds`.
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

// Some positions of one canvas, which a pass runs over.
struct Piece {
  const std::vector<int32_t>* canvas;
  Range rows;
};

// Prepares a pass of `batch` requests over the pieces. Only the inputs of the pass are set.
dlm_pass prepare_pass(const std::vector<Piece>& pieces, int32_t batch, Buffers& buffers);

// Prepares the pass to score the rows in buffers.score_rows, [B, R]. Allocates the candidates, and
// the outputs that `needs` lists.
void prepare_scores(const Denoiser& denoiser, dlm_pass& pass, const Needs& needs, Buffers& buffers);

// Returns one request's part of the outputs. `first` and `apart` are first_row and apart of its
// Member.
Predictions predictions_of(const Denoiser& denoiser, const Request& request, const dlm_pass& pass,
                           size_t first, size_t apart, Buffers& buffers);

// Throws Error(DLM_UNSUPPORTED) if the engine cannot take `batch` requests in one pass.
void check_batch(const Engine& engine, int32_t batch);

// Measures passes over made-up tokens. Writes the time of each of `repeats` passes to `seconds`.
// Each pass runs `batch` requests, with `tokens` tokens over `cached` cached ones, and scores
// `rows` rows. If tokens are cached, a full pass fills the cache first. Calls before_pass before
// each pass; that time is not measured. Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED).
void time_passes(const Denoiser& denoiser, const Engine& engine, Context& context, Buffers& buffers,
                 int32_t batch, int32_t tokens, int32_t cached, int32_t rows, double* seconds,
                 size_t repeats, const std::function<void()>& before_pass);

}  // namespace dlm
