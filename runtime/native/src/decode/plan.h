// Plans the passes of a request. For each pass, the plan says which rows the pass computes, reads
// from the cache, and stores.
//
// The plan depends on the policy's cache:
//   - `none`: every pass runs the whole canvas.
//   - `prefix` and `dual` (Fast-dLLM, arXiv:2505.22618): one pass per block, the opening pass, runs
//     the whole canvas. The block's other passes run fewer positions, and read the cached keys and
//     values of all other positions. With `prefix`, these other passes run from the block's start
//     to the end of the canvas. With `dual`, these other passes run only the block.
//   - `prefix` and `dual` with `refresh`: only the first block's opening pass runs the whole
//     canvas. The opening pass of a later block starts at the preceding block, or `refresh` tokens
//     before the later block if that position is earlier. So the cache never keeps the row of a
//     mask token after the position of the mask token was decided.
//   - `block` (SDAR, arXiv:2510.06303): exact for block-causal attention. Each pass runs one block,
//     and reads the cached rows of the finished blocks. One more pass stores each finished block.
//   - `block-dual` (Fast-dLLM v2, arXiv:2509.26328): like `dual`, but each block is divided into
//     sub-blocks. Passes over the whole block open each sub-block: one pass, or with a shifted
//     denoiser as many passes as it takes to decide the first position of the sub-block. The other
//     passes run only the sub-block.
// exporter/dlm_export/network/passes.py implements the same plan.
//
// With the commit rule `verify` (self-speculation), the plan depends on the tokens. plan_passes
// plans the pass that stores the prompt. After the passes of a block, plan_verified plans the next
// block: a draft pass, and a causal pass over the same rows that verifies the draft. A block starts
// at the first undecided position. Its rows start one position earlier.
//
// A stage is one or more passes over the same range of positions. Requests and pass makers rely on
// these invariants:
//   - Blocks come in order, and the stages of a block are contiguous.
//   - A request goes through the stages once, in order. A request skips stages without work.
//   - An earlier stage has stored every row that a stage reads. With `append`, a stage reads the
//     positions before `rows`. With `read` and `refresh`, a stage reads all positions except
//     `rows`. But with block-causal attention, a stage never reads positions after the block's end.
//   - Each undecided position of a block is in `decided` of one of the block's repeated stages, and
//     this stage waits for the position.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/policy.h"
#include "engines/engine.h"

namespace dlm {

struct Range {
  int32_t first, last;
  int32_t tokens() const { return last - first; }
  bool operator==(const Range& other) const { return first == other.first && last == other.last; }
};

// The kinds of passes that dlm_stats counts. A `prefill` pass fills or refreshes the cache for a
// block. A `denoise` pass predicts tokens. A `store` pass stores the rows of a finished block. A
// `verify` pass stores the rows of a drafted block, and verifies the drafted tokens.
enum class PassKind { prefill, denoise, store, verify };

// One or more passes of the same kind over the same range of positions.
struct Stage {
  Range rows;      // positions that the passes compute
  int32_t cached;  // number of positions outside `rows` whose cached rows the passes read
  CacheUse use;    // whether and how the passes store their rows
  PassKind kind;
  Range decided;  // positions to score and decide; empty if the stage only stores rows
  // Passes repeat until all positions of `awaited` are decided. If `awaited` is empty, the stage
  // makes one pass.
  Range awaited;
  int32_t steps;  // number of passes planned to decide `decided`
  Range block;    // block that the stage belongs to; is_last marks the last stage of the block
  bool is_last;
  bool is_draft;  // the rows see each other; only for denoisers with draft passes
  int32_t shift;  // the row that predicts a position is `shift` positions earlier

  bool is_repeated() const { return awaited.tokens() > 0; }
};

// Checks that the policy suits the denoiser. Returns the policy with the block length that the
// denoiser requires. Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED) if the policy does not suit
// the denoiser.
Policy suit_policy(Policy policy, const Denoiser& denoiser);

// Returns the distance from the row that predicts a position to the position, in passes that are not
// draft passes.
inline int32_t causal_shift(const Denoiser& denoiser) {
  return denoiser.draft_block > 0 ? 1 : denoiser.shift;
}

// Plans the passes that decide the undecided positions of a canvas, block by block. `policy` must
// come from suit_policy. The first block starts at the first undecided position, or at position 0
// with block-causal attention without draft passes. If `steps` is above 0, `steps` is the number of passes planned for
// the whole generation. The tokens of the prompt before the first block are stored in as few passes
// as the engine allows. Throws Error(DLM_INVALID_ARGUMENT).
std::vector<Stage> plan_passes(const std::vector<uint8_t>& undecided, const Policy& policy,
                               const Denoiser& denoiser, int32_t steps, const Engine& engine);

// Appends the stages of the next block to a plan of the commit rule `verify`. The block starts at
// `start`, which is above 0. `length` is the length of the canvas.
void plan_verified(std::vector<Stage>& plan, const Policy& policy, int32_t start, int32_t length);

}  // namespace dlm
