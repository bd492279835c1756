// A Request contains the canvas and the plan of one request, and commits tokens after each pass.
//
// A request is either done, or at a stage that needs a pass. For each pass, the caller first calls
// find_positions() and needs(), then runs the pass, and then calls step(). step() asks the proposer
// for proposals, and commits some of them. If the policy allows edits, step() may also replace
// tokens of the block that earlier passes decided, and passes go on when all positions of the block
// are decided. The constructor and step() call settle(), which moves to the next stage that needs a
// pass. All decided tokens go through take(), which writes a token to the canvas and notifies the
// proposer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "decode/cost.h"
#include "decode/pass_plan.h"
#include "decode/policy.h"
#include "decode/proposer.h"
#include "engines/engine.h"

namespace dlm {

// Stores the canvas and the progress of one request. A Request selects the positions that a pass
// must score (predict), and commits tokens after the pass. A Request does not run passes.
class Request {
 public:
  // `undecided` is 1 for each position to fill, and 0 for all other positions. While a position is
  // undecided, passes use the token that `canvas` contains at this position. The caller must check
  // the ids and lengths first. If `steps` is above 0, the request plans this number of passes for
  // all new tokens. If `proposer` is NULL, the request uses the proposer that the policy selects.
  // `top_log_probs` is the number of alternatives to store for each token that a pass commits.
  // `prefix_group` is dlm_request.prefix_group.
  // If `start_length` is above 0, the canvas starts with only that many tokens, and the other
  // tokens must be undecided mask tokens. Whenever all positions are decided without an end token,
  // the request adds a block of these tokens. If the denoiser changes the length of canvases, only
  // expand tokens add tokens.
  // Throws an Error with status DLM_INVALID_ARGUMENT or DLM_UNSUPPORTED, for example if the plan
  // contains a pass that is too large for the engine.
  Request(const Denoiser& denoiser, const Engine& engine, const Policy& policy,
          std::vector<int32_t> canvas, std::vector<uint8_t> undecided, int32_t steps,
          std::unique_ptr<Proposer> proposer = nullptr, int32_t top_log_probs = 0,
          int32_t prefix_group = 0, int32_t start_length = 0);

  // Returns true if this request and `other` can share passes in lockstep. If the requests use a
  // cache, their passes must run over the same rows.
  bool fits(const Request& other) const;
  bool has_cache() const { return policy_.cache != Cache::none; }
  double guidance() const { return policy_.cfg_scale; }  // returns the guidance scale, or 0
  size_t canvases() const {
    return guidance() > 0 ? 2 : 1;
  }  // returns the number of canvases that this request needs in a pass

  // The largest length of the canvas.
  int32_t longest() const { return longest_; }

  // Returns how many positions at the end of the stored positions later passes may read in layers
  // with a window, or 0 if no layer has a window. A later pass starts at most one block before the
  // last stored position.
  int32_t kept_in_window() const {
    const int32_t window = window_of(denoiser_.cache);
    return window > 0 ? window + policy_.block_length : 0;
  }

  // Returns the number of leading positions whose cached rows (keys and values) may come from
  // another request with the same tokens. With full attention, this number is 0 unless the policy
  // allows approximate rows.
  int32_t reusable() const;
  int32_t prefix_group() const { return prefix_group_; }
  // The first position of the first block. Call this function only if the plan is not empty.
  int32_t first_block() const { return plan_.front().block.first; }
  // Returns true if the next pass stores the cache rows of positions before the first block.
  bool is_filling() const {
    return stage().use == CacheUse::append && stage().kind == PassKind::prefill &&
           stage().rows.first < stage().block.first;
  }
  // Tells the request that the cache rows of the first `rows` positions are already stored. The
  // next passes then do not compute these rows. Call this function only before the first pass, or
  // while is_filling() returns true. `rows` must be a multiple of the block length, and at most
  // reusable().
  void skip_stored(int32_t rows);
  // Splits the passes that store the cache rows of positions before the first block. After this
  // call, each pass has at most `most_tokens` tokens. If `most_ms` is above 0, each pass also takes
  // at most `most_ms` predicted milliseconds. But a pass always contains at least one block. Call
  // this function before the first pass. With full attention, the function does nothing, because
  // these passes cannot be split.
  void split_prefill(int32_t most_tokens, double most_ms, const PassCost& cost);
  // Returns the number of leading positions whose cache rows are final after the next pass. No
  // later pass of this request computes final rows again, so other requests may use them. `exact`
  // is the number of leading positions whose rows are final now. With block-causal attention, final
  // rows are exact.
  int32_t exact_after(int32_t exact) const;

  bool done() const { return stage_ == plan_.size(); }
  size_t stage_number() const { return stage_; }
  const Stage& stage() const { return plan_[stage_]; }
  const std::vector<int32_t>& canvas() const { return canvas_; }
  // Returns a canvas by its index. Canvas 0 is the request's own canvas. With guidance, canvas 1 is
  // a copy in which mask tokens replace the prompt and all other tokens that the caller gave.
  const std::vector<int32_t>& canvas(size_t number) const {
    return number == 0 ? canvas_ : unconditional_;
  }
  // One entry per position: 1 if the position is undecided, otherwise 0.
  const std::vector<uint8_t>& undecided() const { return undecided_; }
  bool is_given(size_t position) const { return is_given_[position]; }
  // The self-conditioning of the rows of the next pass, [rows, C], which the last pass over the
  // same block returned. Empty if all numbers are 0: before the first pass over a block, in passes
  // that only store rows, and if the denoiser has no self-conditioning. Also empty if contexts keep
  // self-conditioning.
  const std::vector<float>& conditioning() const { return conditioning_; }
  // Returns true if the last pass was over the same block and returned self-conditioning.
  bool has_conditioning() const { return has_conditioning_; }
  // The temperature of the next pass. The graph uses it to compute self-conditioning.
  float graph_temperature() const;
  // Returns true if the canvas may not become longer, so that the next pass must not predict an
  // expand token.
  bool rules_out_expand() const {
    return denoiser_.resizes() &&
           (static_cast<int32_t>(canvas_.size()) >= longest_ || expansions_left_ <= 0);
  }
  // Returns true if later passes may replace decided tokens.
  bool edits() const { return policy_.remask == Remask::edit; }
  int32_t nfe() const { return nfe_; }
  int32_t committed() const { return committed_; }  // positions that the last pass decided
  // Returns the number of passes so far, counted as if no pass had been skipped or split.
  int32_t planned_nfe() const { return nfe_ + skipped_; }
  dlm_step view() const;

  // Returns the load of the next pass. PassCost predicts the time of the pass from this load. Call
  // find_positions() first.
  PassLoad load() const { return load_of(stage(), positions_.size()); }
  // Returns the load of one pass of a repeated stage. Of the stages that remain, the function
  // chooses the stage with the most expensive passes.
  PassLoad usual_load(const PassCost& cost) const;

  // Finds the positions that the next pass must score. Returns the number of positions, which is 0
  // if the pass only stores rows. With remask "noise", writes the random tokens from which a block
  // starts.
  size_t find_positions();
  // The positions that find_positions found, in ascending order.
  const std::vector<int32_t>& positions() const { return positions_; }
  // Returns the row of the pass that predicts a position.
  int32_t row_of(int32_t position) const {
    return std::max(position - stage().shift, 0) - stage().rows.first;
  }
  // Returns the outputs that the next pass must return. If the request needs no
  // logits of the pass, it needs no outputs.
  Needs needs() const;
  // Sets what the next pass draws from the request's rows, if the engine draws. The rows start at
  // `first`. With guidance, those of the second canvas start at `first` + `apart`.
  void set_draws(std::vector<DrawRow>& rows, size_t first, size_t apart) const;

  // Commits tokens after a pass. The pass must have scored the positions that find_positions found.
  // Throws an Error with status DLM_ENGINE_FAILED.
  void step(const Predictions& predictions, Proposals& proposals);

  // Ends a request early and fills its canvas. Does nothing if the request is done. Each undecided
  // position gets the token that the last pass proposed for this position. If the last pass
  // proposed no token, the position gets the token that the proposer's complete() chooses. If
  // complete() chooses no token, the position gets an end token. If the denoiser changes the length
  // of canvases, a position without a token, or with an expand or delete token, is removed instead.
  // The positions that end() fills still count as undecided. `why` is a DLM_FINISH_ constant.
  void end(int32_t why);
  // Like end(), but leaves the canvas unchanged. So this function needs no memory.
  void drop() noexcept;

  // Returns the fields of dlm_result that the Request knows. Call this function when the request is
  // done. The Request owns the memory to which the fields point.
  dlm_result result() const;

 private:
  PassLoad load_of(const Stage& stage, size_t rows) const;
  // Returns true if passes decide positions of several blocks (next_block). The stages of these
  // blocks are stage_ to last_stage_.
  bool is_ahead() const { return policy_.next_block < 1; }
  // The positions that the next pass may decide.
  Range window() const {
    return is_ahead() ? Range{stage().decided.first, plan_[last_stage_].decided.last}
                      : stage().decided;
  }
  void widen();
  // Returns the share of the positions of a stage that is decided.
  double decided_share(size_t number) const {
    const Range range = plan_[number].decided;
    return 1 - static_cast<double>(count_undecided(range)) / range.tokens();
  }
  std::vector<StartedBlock> started_blocks() const;
  void choose_rows();
  void choose_approximate_rows(Stage& now);
  void close();
  // Turn::passes is planned_nfe(), so that random numbers do not depend on which rows were already
  // stored. With remask "noise", Turn::passes is the number of passes over the block. So random
  // numbers also do not depend on how the prompt was split into passes. With commit "verify",
  // Turn::passes is 0, so that random numbers depend only on the position. Then a token is the same
  // for every draft, and a draft uses the same random numbers as the pass that verifies it.
  Turn turn() const { return turn(stage().block, verifies() && !stage().is_draft); }
  Turn turn(Range block, bool is_causal) const {
    return {canvas_,
            undecided_,
            positions_,
            block,
            verifies() ? 0 : renoises() ? step_ : planned_nfe(),
            temperature(),
            is_causal};
  }
  double temperature() const { return temperature_of(policy_, step_, stage().steps); }
  // Lengthens the canvas with undecided mask tokens, up to `length` positions.
  void extend(size_t length);
  // Lengthens the canvas by a block and plans the passes of the block, if all positions are decided
  // without an end token and the canvas is shorter than longest_. Returns false otherwise.
  bool grow();
  // Returns the number of mask tokens by which the canvas grows.
  int32_t growth() const {
    return policy_.block_length > 0 ? policy_.block_length : denoiser_.max_new_tokens;
  }
  // Removes the delete tokens that the last pass committed, and replaces each expand token by two
  // mask tokens. An expand token for which there is no room becomes one mask token.
  void resize();
  // Replaces the position `at` by `count` undecided mask tokens, and moves the end of the plan's
  // block.
  void replace(int32_t at, int32_t count);
  // Replaces `removed` positions from `at` on by `added` undecided mask tokens.
  void splice(int32_t at, int32_t removed, int32_t added);
  // Returns true if one of the first `length` positions contains a generated end token.
  bool has_end(size_t length) const;
  // Puts an end token at the last position if the policy reserves this position. The request treats
  // this token as given by the caller.
  void reserve();
  int32_t count_undecided(Range range) const;
  void check_limits() const;
  void check_prediction(size_t row, int32_t token, double prob, double score) const;
  // Returns the score of a row in the unit that callers see: a fraction or an entropy.
  double reported(const Proposals& proposals, size_t row) const;
  void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals);
  // Fills proposals.losses.
  void find_losses(const Predictions& predictions, Proposals& proposals) const;
  // Returns how many of the `left` undecided positions the schedule commits in the next pass.
  int32_t planned(int32_t left) const;
  // Returns true if the policy allows edits and the passes of the stage compute the whole block.
  bool may_edit(const Stage& stage) const {
    return edits() && stage.rows.first <= stage.block.first && stage.rows.last >= stage.block.last;
  }
  void commit(const Predictions& predictions, const Proposals& proposals);
  void choose_commits(const Proposals& proposals);
  void draft(const Proposals& proposals);
  void verify(const Predictions& predictions, Proposals& proposals,
              const std::vector<int32_t>& drafted);
  void cut_at_end(const Proposals& proposals);
  bool verifies() const { return policy_.commit == Commit::verify; }
  // Returns true if the plan depends on the tokens, so that it contains only the blocks so far.
  bool plans_late() const { return verifies() || denoiser_.has_shifted_drafts; }
  // Appends the largest passes of the blocks from `from` on to a plan, if plans_late().
  void plan_largest(std::vector<Stage>& plan, int32_t from) const;
  bool renoises() const { return policy_.remask == Remask::noise; }
  // Writes random tokens to the undecided positions of `range`, before pass number `step`.
  void write_random(Range range, int32_t step);
  // The same for the positions of the stage, except that positions with only one possible token get
  // this token.
  void write_noise(int32_t step);
  // Chooses the tokens of the next pass over the block. If the block needs no more passes, decides
  // the whole block instead.
  void renoise(const Predictions& predictions, Proposals& proposals);
  // Returns true if the most likely tokens and their entropies meet the policy's condition for
  // ending the block early.
  bool is_stable(const Proposals& proposals);
  bool rewrites() const { return policy_.remask == Remask::rewrite; }
  // Returns true if the block still has a mask token that no delete or split token added.
  bool has_first_masks() const;
  // Returns true if the policy allows no pass over the block after the next pass.
  bool must_end_rewriting() const;
  std::vector<int32_t> block_tokens() const {
    return {canvas_.begin() + stage().block.first, canvas_.begin() + stage().block.last};
  }
  // Writes the proposed tokens that the policy chooses, and applies delete and split tokens. After
  // the last pass over a block, decides the whole block.
  void rewrite(const Predictions& predictions, Proposals& proposals);
  // Fills order_ with the rows to write, in ascending order. Returns true if this is the last pass
  // over the block.
  bool choose_rewrites(const Proposals& proposals);
  // Proposes the row's most likely token that is not in `ruled_out`.
  void propose_other(const Predictions& predictions, int32_t row,
                     const std::vector<int32_t>& ruled_out, Proposals& proposals) const;
  // Applies the delete and split tokens among the proposals for the rows in order_. Then cuts the
  // block to its length, or fills it up with mask tokens.
  void shift_block(const Proposals& proposals);
  void note_guesses(const Proposals& proposals);
  void take(const Predictions& predictions, const Proposals& proposals,
            const std::vector<int32_t>& chosen);
  void take(int32_t position, int32_t token, double log_prob, double loss = 0);
  void keep_alternatives(const Predictions& predictions, size_t row);
  double loss_of(const Certain& certain, const Predictions* predictions) const;
  void scaffold(Range range, const Predictions* predictions = nullptr);
  void settle(const Predictions* predictions = nullptr);
  bool end_early(Range block);

  const Denoiser& denoiser_;
  const Engine& engine_;
  Policy policy_;
  const int32_t steps_;  // the planned number of passes, or 0
  int32_t longest_;
  std::vector<int32_t> canvas_, unconditional_;
  std::vector<uint8_t> undecided_;
  std::vector<bool> is_given_;
  bool is_reserved_ = false;
  int32_t given_ = 0;            // number of tokens that the caller gave
  int32_t expansions_left_ = 0;  // how many more expand tokens may lengthen the canvas
  std::vector<Stage> plan_;
  size_t stage_ = 0, last_stage_ = 0;
  // is_made_: this stage has made a pass. is_editing_: all positions of the block are decided, but
  // passes may still replace their tokens.
  bool is_made_ = false, is_editing_ = false;
  // step_: number of passes that this stage has made. masked_: number of undecided positions before
  // the stage's first pass.
  int32_t step_ = 0, masked_ = 0;
  // edits_: number of passes over the current block since it was decided. nfe_: number of all
  // passes that the request has made.
  int32_t edits_ = 0, nfe_ = 0;
  // For next_block below 1 and a cache. cached_: number of leading positions whose rows later
  // passes read. Only cache "prefix" uses the others. has_rows_: a pass has stored rows.
  // decided_at_: the number of the first pass before which all positions of the next uncached block
  // were decided, or -1. The prompt has the number 0.
  int32_t cached_ = 0, decided_at_ = 0;
  bool has_rows_ = false;
  // The number of passes that skip_stored() removed, minus the number of passes that
  // split_prefill() added.
  int32_t skipped_ = 0;
  std::vector<int32_t> positions_;  // set by find_positions
  bool is_constrained_;
  std::unique_ptr<Proposer> proposer_;
  std::vector<int32_t> order_, guess_;
  std::vector<float> score_, log_probs_;
  // For remask "noise". best_: the most likely text of the last pass over the block. best_before_:
  // that of the pass before it. stable_: how
  // many consecutive passes before the last pass had these same most likely tokens.
  std::vector<int32_t> best_, best_before_;
  int32_t stable_ = 0;
  std::vector<float> conditioning_;
  bool has_conditioning_ = false;
  // For remask "rewrite". is_added_: for each position, 1 if delete or split tokens added it. The
  // others are about the passes over the current block. seen_: the tokens of the block before each
  // pass. written_: the tokens that passes wrote, for each row. settled_: number of passes for
  // which has_first_masks() was false.
  std::vector<uint8_t> is_added_;
  std::set<std::vector<int32_t>> seen_;
  std::vector<std::vector<int32_t>> written_;
  int32_t settled_ = 0;
  // The alternatives of all positions, top_count_ for each position. See dlm_result.
  size_t top_count_;
  int32_t prefix_group_;
  std::vector<int32_t> top_tokens_;
  std::vector<float> top_log_probs_;
  // The loss of each position (see Proposals::losses). This list is empty if the request has no
  // constraint.
  std::vector<double> losses_;
  int32_t finish_ = DLM_FINISH_NONE;  // the reason if the request ended early
  std::vector<Certain> certain_;
  int32_t committed_ = 0, view_start_ = 0, view_end_ = 0;
};

}  // namespace dlm
