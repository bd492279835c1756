// Prepares the arrays of one pass, and finds the part of the outputs that belongs to each request.
//
// A pass is made in this order:
//   1. prepare_pass sets the inputs.
//   2. The pass maker fills buffers.score_rows with the rows to score. For these rows, the pass
//      predicts tokens.
//   3. prepare_scores allocates the outputs.
//   4. The engine runs the pass.
//   5. rule_out_unused excludes the ids that are no tokens.
//   6. predictions_of returns each request's part of the outputs.
// The pointers in a Pass point into the Buffers. The Pass is valid until the Buffers are
// used for the next pass.
//
// The scored rows are the rows for which the pass predicts tokens. The scored rows of all requests
// form one array of shape [B, R]. B is the batch size, and R is the
// number of scored rows for each entry of the batch. The rows of one request follow each other in
// the order of the request's positions. The first of them has the index Member::first_row. This is
// an index into the array [B * R]. A
// request with guidance has two canvases. The rows of the second canvas start at the index
// first_row + Member::apart.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "decode/guidance.h"
#include "decode/request.h"
#include "engines/engine.h"

namespace dlm {

// The arrays of a pass. The next pass uses the same arrays again. So a second pass of the same size
// allocates no memory.
struct Buffers {
  std::vector<int64_t> input_ids, position_ids, score_rows;
  std::vector<int32_t> top_tokens;
  std::vector<float> top_probs, top_log_odds, entropy, logits;
  std::vector<float> conditioning, temperature, next_conditioning;
  Draws draws;
  Proposals proposals;
  Guided guided;
};

// The largest number of canvases in one pass. This limit ensures that array sizes do not overflow.
constexpr int32_t kMostRequests = 4096;

// Measures the time from its construction to its destruction, and adds the seconds to `seconds`.
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

// Positions of one canvas that a pass computes. The rows from the position `draft_rows` on are
// draft rows. Denoiser::draft_block says which rows they see. If is_updated is true, they use the
// low-rank updates of the denoiser. If drafts are causal, they always use them.
//
// If the denoiser has blocks_after_prompt, `first_block` is the end of the prompt.
struct Piece {
  const std::vector<int32_t>* canvas;
  Range rows;
  int32_t draft_rows = INT32_MAX;
  bool is_updated = false;
  // The self-conditioning of the rows, [rows, C]. If it is NULL or empty, all numbers are 0.
  const std::vector<float>* conditioning = nullptr;
  int32_t first_block = INT32_MAX;
};

// Prepares a pass of batch size `batch` over the pieces. Sets only the inputs of the pass;
// prepare_scores adds the outputs. If the pass has only one piece, the pass reads the piece's
// self-conditioning without a copy.
Pass prepare_pass(const Denoiser& denoiser, const std::vector<Piece>& pieces, int32_t batch,
                  Buffers& buffers);

// Prepares the pass to score the rows in buffers.score_rows, which has shape [B, R]. Allocates
// memory for the candidates, and for the other outputs that `needs` selects. If the denoiser has
// self-conditioning, sets the temperature of all rows to 1. The caller may then change
// buffers.temperature.
void prepare_scores(const Denoiser& denoiser, Pass& pass, const Needs& needs, Buffers& buffers);

// Sets the logits of the denoiser's unused_tokens to -inf, so that no proposer chooses them. The
// graph's candidates do not contain them.
void rule_out_unused(const Denoiser& denoiser, const dlm_pass& pass);

// Returns the part of the outputs that belongs to one request. `first` and `apart` are the fields
// first_row and apart of the request's Member.
Predictions predictions_of(const Denoiser& denoiser, const Request& request, const Pass& pass,
                           size_t first, size_t apart, Buffers& buffers);

// Throws an Error with status DLM_UNSUPPORTED if the engine cannot run `batch` canvases in one
// pass.
void check_batch(const Engine& engine, int32_t batch);

// Measures the time of passes over arbitrary tokens. Runs `repeats` passes, and writes the time of
// each pass in seconds to `seconds`. Each pass runs `batch` requests. For each request, the pass
// computes `tokens` new tokens, reads `cached` cached tokens, and scores `rows` rows. If `cached`
// is above 0, one more pass fills the cache first. Calls before_pass before each pass, outside of
// the measured time. Throws an Error with status DLM_INVALID_ARGUMENT or DLM_UNSUPPORTED.
void time_passes(const Denoiser& denoiser, const Engine& engine, Context& context, Buffers& buffers,
                 int32_t batch, int32_t tokens, int32_t cached, int32_t rows, double* seconds,
                 size_t repeats, const std::function<void()>& before_pass);

}  // namespace dlm
