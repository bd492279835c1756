// Plans the passes of a request. For each pass, the plan says which rows the pass computes, which
// rows it reads from the cache, and which rows it stores. A row is the keys and values of one
// position.
//
// The plan depends on the field `cache` of the policy:
//   - `none`: every pass runs the whole canvas.
//   - `prefix` and `dual` (Fast-dLLM, arXiv:2505.22618): each block starts with one pass over the
//     whole canvas, the opening pass. The other passes of the block run fewer positions, and read
//     the cached rows of all other positions. With `prefix`, they run the positions from the start
//     of the block to the end of the canvas. With `dual`, they run only the block.
//   - `prefix` and `dual` with `refresh`: only the opening pass of the first block runs the whole
//     canvas. The opening pass of a later block starts at the start of the preceding block. If
//     that is less than `refresh` tokens earlier, it starts `refresh` tokens before the later
//     block. So the opening pass recomputes the rows that were stored while the preceding block
//     still contained mask tokens. If the canvas has grown, the opening pass of the new block runs
//     the whole canvas.
//   - `prefix` with `next_block` below 1 (d3LLM, arXiv:2601.07568): passes run from the first
//     position that is not cached to the end of the canvas. Request::choose_rows chooses the rows
//     of each pass.
//   - `block` with `next_block` below 1 (D2F, arXiv:2508.09192): exact for block-causal attention.
//     Request::choose_rows chooses the rows of each pass.
//   - `block` (SDAR, arXiv:2510.06303): exact for block-causal attention. Each pass runs one block,
//     and reads the cached rows of the finished blocks. One more pass stores each finished block.
//   - `block-dual` (Fast-dLLM v2, arXiv:2509.26328): like `dual`, but each block is divided into
//     sub-blocks. Each sub-block starts with one pass over the whole block. With a shifted
//     denoiser, these passes repeat until the first position of the sub-block is decided. The other
//     passes run only the sub-block. A shifted denoiser predicts each position in the row before
//     it.
// exporter/dlm_export/network/pass_plan.py implements the same plan.
//
// With the commit rule `verify` (self-speculation), the plan depends on the tokens. plan_passes
// plans the pass that stores the prompt. After the passes of a block, plan_verified plans the next
// block. A block starts at the first undecided position. Its rows start one position earlier. If
// all rows of a draft pass attend to each other, the block has a draft pass, and a causal pass over
// the same rows that verifies the draft. If drafts are causal too (I-DLM, Uno), one pass verifies a
// draft and drafts the next block. Its rows are those of the verified block, and then the draft
// rows. If a drafted token is wrong, the next block has one position, because the tokens drafted
// after it came from wrong rows.
//
// If the denoiser has shifted drafts (SDLM), the plan depends on the tokens too. After each pass,
// plan_prefix plans the next block: one draft pass, whose causal rows store the tokens that the
// last pass decided.
//
// With remask `noise` (DiffusionGemma) and `rewrite` (LLaDA2.2), the plan is the same as with
// `none`. No position of a block is decided before its last pass, so each pass scores all undecided
// positions of the block.
//
// A stage is one or more passes over the same range of positions. Requests and pass makers
// (decode/pass_maker.h) rely on these invariants:
//   - Blocks come in order, and the stages of a block follow each other.
//   - A request goes through the stages in order, and skips stages that have no work.
//   - Every cached row that a stage reads was stored by an earlier stage. With `append`, a stage
//     reads the positions before `rows`. With `read` and `refresh`, a stage reads all positions
//     except `rows`. With block-causal attention, a stage never reads positions after the end of
//     its block.
//   - Each undecided position of a block belongs to the range `decided` of one of the block's
//     repeated stages. This stage repeats until it has decided the position.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/policy.h"
#include "engines/engine.h"

namespace dlm {

// The largest number of tokens in a pass that stores a part of a prompt, if the prompt is saved in
// a file or the denoiser has layers with a window. exporter/dlm_export/network/spec.py contains the
// same number.
constexpr int32_t kPassTokens = 512;

struct Range {
  int32_t first, last;
  int32_t tokens() const { return last - first; }
  bool operator==(const Range& other) const { return first == other.first && last == other.last; }
};

// The kinds of passes that dlm_stats counts. A `prefill` pass stores or recomputes cached rows for
// a block. A `denoise` pass predicts tokens. A `store` pass stores the rows of a finished block. A
// `verify` pass stores the rows of a drafted block, and verifies the drafted tokens.
enum class PassKind { prefill, denoise, store, verify };

// One or more passes of the same kind over the same range of positions.
struct Stage {
  Range rows;      // positions that the passes compute
  int32_t cached;  // number of positions outside `rows` that the passes read from the cache
  CacheUse use;    // whether and how the passes store their rows
  PassKind kind;
  Range decided;  // positions to score and decide; empty if the stage only stores rows
  // Passes repeat until all positions of `awaited` are decided. If `awaited` is empty, the stage
  // makes one pass.
  Range awaited;
  // Number of passes in which the policy's schedule decides all positions in `decided`.
  int32_t steps;
  Range block;    // block that the stage belongs to
  bool is_last;   // true for the last stage of the block
  bool is_draft;  // true for draft passes, in which all rows attend to each other
  int32_t shift;  // the row that predicts a position is `shift` positions earlier
  // The passes use the low-rank updates of the denoiser, because a later pass verifies their
  // tokens.
  bool is_updated = false;
  int32_t causal_rows = 0;  // how many of the first rows of a draft pass are causal
  // Positions of the next block whose tokens the pass drafts while it verifies this block. The rows
  // that predict them contain random tokens or mask tokens, and are the last rows of the pass.
  Range drafted{};

  // Returns the position of the first draft row, or the end of the rows if all are ordinary.
  int32_t draft_rows() const {
    return is_draft ? rows.first + causal_rows : rows.last - drafted.tokens();
  }
  bool is_repeated() const { return awaited.tokens() > 0; }
};

// Checks that the policy suits the denoiser. Returns a copy of the policy with the block length
// that the denoiser requires. Throws an Error with status DLM_INVALID_ARGUMENT or DLM_UNSUPPORTED
// if the policy does not suit the denoiser.
Policy suit_policy(Policy policy, const Denoiser& denoiser);

// Returns the number n for which row i - n predicts position i in passes that are not draft passes.
// With remask "noise", the causal passes of a denoiser with draft passes predict no position, and
// the result is 0.
inline int32_t causal_shift(const Policy& policy, const Denoiser& denoiser) {
  if (denoiser.draft_block == 0) return denoiser.shift;
  return policy.remask == Remask::noise ? 0 : 1;
}

// Plans the passes that decide the undecided positions of a canvas, block by block. `policy` must
// come from suit_policy. The first block starts at the first undecided position. With block-causal
// attention (visible_block above 1, no blocks_after_prompt), it starts at the last multiple of the
// block length up to this position. If `steps` is above 0, `steps` is the number of passes planned
// for all blocks together. The plan stores the cache rows of the prompt before the first block in
// as few passes as the engine allows. Throws an Error with status DLM_INVALID_ARGUMENT.
std::vector<Stage> plan_passes(const std::vector<uint8_t>& undecided, const Policy& policy,
                               const Denoiser& denoiser, int32_t steps, const Engine& engine);

// Appends the stages of the next block to a plan of the commit rule `verify`. The block starts at
// `start`, which is above 0. `length` is the length of the canvas. `drafts` is the number of tokens
// that the last pass drafted from `start` on. It is used only if drafts are causal.
void plan_verified(std::vector<Stage>& plan, const Policy& policy, const Denoiser& denoiser,
                   int32_t start, int32_t length, int32_t drafts);

// Appends the stage of the next block to the plan of a denoiser with shifted drafts. The cache
// holds the rows of the first `stored` positions. The block starts at `start`, which is above
// `stored`.
void plan_prefix(std::vector<Stage>& plan, const Policy& policy, int32_t stored, int32_t start,
                 int32_t length);

}  // namespace dlm
