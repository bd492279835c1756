// The unmasking loop: requests' canvases, the stages of their plans, one pass and its commits a
// step.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "decode/cost.h"
#include "decode/guidance.h"
#include "decode/plan.h"
#include "decode/policy.h"
#include "decode/proposer.h"
#include "engines/engine.h"

namespace dlm {

// What the loop knows of a denoiser, checked.
struct Denoiser {
  int32_t vocab_size, mask_token_id, max_canvas_length, top_k, shift;
  bool has_cache;
  CacheShape cache;  // at least one layer, and of no use where there is none
  std::vector<int32_t> eos_token_ids;
  int32_t visible_block = 0;  // 0: attention is full
};

// Inputs and outputs of passes, which outlive a batch, so that the next one of the same size
// allocates nothing.
struct Buffers {
  std::vector<int64_t> input_ids, position_ids, score_rows;
  std::vector<int32_t> top_tokens;
  std::vector<float> top_probs, entropy, logits;
  Proposals proposals;
  Guided guided;
};

// The most requests that a pass takes: sizes of its arrays stay far from overflow.
constexpr int32_t kMostRequests = 4096;

// Why a request ended, as dlm_result has it.
enum class Finish : int32_t {
  none = DLM_FINISH_NONE,
  stop = DLM_FINISH_STOP,
  length = DLM_FINISH_LENGTH,
  steps = DLM_FINISH_STEPS,
  deadline = DLM_FINISH_DEADLINE,
  cancelled = DLM_FINISH_CANCELLED,
  constraint = DLM_FINISH_CONSTRAINT
};

// What a request came to, beside its canvas.
struct Outcome {
  Finish finish;
  int32_t nfe, prompt_tokens, completion_tokens;
  std::vector<float> log_probs;    // by position; NaN where no token was committed
  std::vector<uint8_t> undecided;  // by position, 1 or 0
  double constraint_log_prob_loss =
      0;  // nats: the sum over positions that were decided under a constraint
};

// A request's canvas: which of its positions passes score, and what commits of what its proposer
// makes of them. It makes no passes itself.
class Request {
 public:
  // undecided says for each position of the canvas whether a token is wanted there, whatever token
  // passes shall see until then; ids and lengths are checked already. steps > 0 plans that many
  // passes for the whole generation. name: what its errors start with, such as "request 3: ".
  // Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED), where it may need a pass that the engine
  // does not take as well. proposer: NULL for the policy's own.
  Request(const Denoiser& denoiser, const Engine& engine, const Policy& policy,
          std::vector<int32_t> canvas, std::vector<uint8_t> undecided, int32_t steps,
          std::string name = "", std::unique_ptr<Proposer> proposer = nullptr);

  // Whether both can be in one batch: over a cache, their passes run over the same rows.
  bool fits(const Request& other) const;
  bool has_cache() const { return policy_.cache != Cache::none; }
  double guidance() const { return policy_.cfg_scale; }       // 0: none
  size_t canvases() const { return guidance() > 0 ? 2 : 1; }  // that a pass takes of it

  bool done() const { return stage_ == plan_.size(); }
  size_t stage_number() const { return stage_; }
  const Stage& stage() const { return plan_[stage_]; }
  const std::string& name() const { return name_; }
  const std::vector<int32_t>& canvas() const { return canvas_; }
  const std::vector<int32_t>& unconditional() const {
    return unconditional_;
  }  // the canvas without what is given, for guidance
  const std::vector<uint8_t>& undecided() const { return undecided_; }  // by position, 1 or 0
  int32_t nfe() const { return nfe_; }
  dlm_step view() const;

  // What the next pass computes for it, once find_positions has found what it scores.
  PassLoad load() const { return load_of(stage(), positions_.size()); }
  // What the passes ahead compute of which a stage may take several, the costliest of them.
  PassLoad usual_load(const PassCost& cost) const;

  // Finds the positions that the next pass scores; returns how many they are. None where it only
  // stores.
  size_t find_positions();
  const std::vector<int32_t>& positions() const { return positions_; }  // ascending
  Needs needs() const;  // of that pass; nothing where it scores none

  // Commits after a pass that scored what find_positions found. Throws Error(DLM_ENGINE_FAILED) for
  // impossible predictions.
  void step(const Predictions& predictions, Buffers& buffers);

  // Ends a request before all is decided; nothing once it is done. What is undecided takes what the
  // last pass proposed there, and where that scored nothing what its proposer completes it by, or
  // an end token; it stays undecided.
  void end(Finish why);
  void drop() noexcept;  // the same with the canvas as it is, where end finds no memory
  Outcome outcome() const;

 private:
  PassLoad load_of(const Stage& stage, size_t rows) const;
  Turn turn() const { return {canvas_, undecided_, positions_, stage().block, nfe_, is_editing_}; }
  int32_t count_undecided(Range range) const;
  void check_limits(const Engine& engine) const;
  void propose(const Predictions& predictions, Proposals& proposals);
  void commit(const Proposals& proposals);
  void edit(const Proposals& proposals);
  void limit(const Proposals& proposals, std::vector<int32_t>& chosen) const;
  void take(const Proposals& proposals, const std::vector<int32_t>& chosen);
  void take(int32_t position, int32_t token, double log_prob, double loss = 0);
  bool is_end(int32_t token) const;
  double loss_of(const Certain& certain, const Predictions* predictions) const;
  void scaffold(Range range, const Predictions* predictions = nullptr);
  void settle(const Predictions* predictions = nullptr);
  bool end_early(Range block);

  const Denoiser& denoiser_;
  Policy policy_;
  std::string name_;
  std::vector<int32_t> canvas_, unconditional_;
  std::vector<uint8_t> undecided_;
  std::vector<bool> is_given_;
  std::vector<Stage> plan_;
  size_t stage_ = 0;
  bool is_made_ = false, is_editing_ = false;  // of the stage: a pass was made; its block is full
  int32_t step_ = 0,
          masked_ = 0;  // of its positions: passes made, and how many were undecided before
  int32_t edits_ = 0;   // passes over its full block
  int32_t nfe_ = 0;
  std::vector<int32_t> positions_;  // what find_positions found
  bool is_constrained_;
  std::unique_ptr<Proposer> proposer_;
  std::vector<int32_t> order_, guess_;
  std::vector<float> score_, log_probs_;
  std::vector<double> losses_;    // by position, see Proposals::losses; empty without a constraint
  Finish finish_ = Finish::none;  // of a request that was ended
  std::vector<Certain> certain_;
  int32_t committed_ = 0, view_start_ = 0, view_end_ = 0;
};

// Requests, whatever their policies, that go through their passes together; one alone is a batch
// too.
//
// Over a cache they go in lockstep, as its rows are moved for all of them alike: a request that has
// finished a stage waits for the slowest, its rows computed and ignored. A request that is done
// leaves at the next pass that reads no cache, which over the cache `block` means the first block
// alone. Without a cache each goes at its own pace and leaves when it is done. A request gets what
// it would get alone, after as many passes.
class Batch {
 public:
  // All fit each other; there is at least one.
  Batch(const Denoiser& denoiser, std::vector<Request> requests)
      : denoiser_(denoiser), requests_(std::move(requests)) {}

  // One pass and its commits; nothing once done. Throws what the context throws; the batch is then
  // unusable.
  void step(Context& context, Buffers& buffers);

  bool done() const;
  void end(size_t number, Finish why) { requests_[number].end(why); }  // see Request::end
  void drop(size_t number) noexcept { requests_[number].drop(); }
  const std::vector<Request>& requests() const { return requests_; }
  const dlm_stats& stats() const { return stats_; }
  const dlm_pass_counts& counts() const { return counts_; }

 private:
  // A row of the passes: whose canvas it is, and which of the two where the request is guided.
  struct Row {
    size_t request;
    bool is_unconditional;
  };

  // A request that takes part in a pass, and which of the batch's rows is its; the next one is too
  // if it is guided.
  struct Part {
    Request* request;
    size_t row;
  };

  std::vector<Part> find_parts();
  dlm_pass run_pass(const std::vector<Part>& parts, Context& context, Buffers& buffers);

  const Denoiser& denoiser_;
  std::vector<Request> requests_;
  std::vector<Row> rows_;
  Range kept_{0, 0};  // outside of which the cache's rows were kept, and nothing was stored since;
                      // or of no tokens
  dlm_stats stats_{};
  dlm_pass_counts counts_{};
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

// Gives the pass room for what is needed of its scored rows, beside their candidates.
void prepare_needs(const Denoiser& denoiser, dlm_pass& pass, const Needs& needs, Buffers& buffers);

// What the pass says to a request whose scored rows start at row `first`, guidance's `apart` rows
// behind them.
Predictions predictions_of(const Denoiser& denoiser, const Request& request, const dlm_pass& pass,
                           size_t first, size_t apart, Buffers& buffers);

// Measures the time that it lives.
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

// Fills the pass's inputs for positions [first, last) of the canvases; scored rows and outputs are
// left unset.
dlm_pass prepare_pass(const std::vector<const std::vector<int32_t>*>& canvases, int32_t first,
                      int32_t last, Buffers& buffers);

// Makes the pass score the rows in buffers.score_rows, [B, R], and gives it room for their
// candidates.
void prepare_scores(const Denoiser& denoiser, dlm_pass& pass, Buffers& buffers);

// The seconds of each of `repeats` passes of B = `batch` requests, `tokens` over `cached` ones that
// score `rows`, on made-up tokens; a full pass fills the cache before them. before_pass is called
// before each, untimed. Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED), and what the context
// and before_pass throw.
void time_passes(const Denoiser& denoiser, const Engine& engine, Context& context, Buffers& buffers,
                 int32_t batch, int32_t tokens, int32_t cached, int32_t rows, double* seconds,
                 size_t repeats, const std::function<void()>& before_pass);

}  // namespace dlm
