// The plan of a request's passes: what each computes, reads from the cache, and keeps.
//
// Caches: `none` runs the whole canvas every pass. `prefix` and `dual` (Fast-dLLM,
// arXiv:2505.22618) run it once a block and then only [block start, end of canvas) or the block
// itself, over the keys and values of everything else. With `refresh`, only the first block's
// opening pass runs the whole canvas: a later one reaches back to the start of the block decided
// before it, or `refresh` tokens if that is farther, so that no kept row is of a mask token whose
// place has been filled since. `block` (SDAR, arXiv:2510.06303) is exact: where attention is
// block-causal, a block's passes run it alone over the finished ones, which one pass stores.
// `block-dual` (Fast-dLLM v2, arXiv:2509.26328) is `dual` inside of a block: a pass over the block
// opens each sub-block, whose other passes run it alone over what that one made of the rest.
// exporter/dlm_export/network/passes.py states the same plan.
//
// Invariants that requests and pass makers rely on. Blocks come in order, and the stages of a block
// follow each other. A request goes through the stages once, leaves out those without work, and
// never goes back. What a stage reads was kept by an earlier one: `append` reads the positions
// before `rows`; `read` and `refresh` all but `rows`, with block-causal attention up to the block's
// end. Each undecided position of a block is in `decided` of one of its repeated stages.
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

// For dlm_stats. prefill: fills or refreshes a cache before a block. store: stores a finished one.
enum class PassKind { prefill, denoise, store };

// Passes of one kind over one range.
struct Stage {
  Range rows;      // what they compute
  int32_t cached;  // how many others they read
  CacheUse use;    // and what becomes of their own
  PassKind kind;
  bool is_repeated;  // until `decided` is; else there is one
  Range decided;     // the positions that they score and commit; may be empty where rows are stored
  int32_t steps;     // planned for these
  Range block;       // that they belong to; it is done behind a stage that
  bool is_last;
};

// The policy with the block length that it has on a denoiser of this visible_block (dlm_denoiser's)
// and shift. Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED) where they do not go together.
Policy suit_policy(Policy policy, int32_t visible_block, int32_t shift);

// The passes that decide the undecided positions of a canvas, block by block; `policy` is
// suit_policy's. Blocks are counted from the first undecided position, or where attention is
// block-causal from position 0. steps > 0 plans that many passes for the whole generation. What is
// given is stored in as few passes as the engine takes. Throws Error(DLM_INVALID_ARGUMENT).
std::vector<Stage> plan_passes(const std::vector<uint8_t>& undecided, const Policy& policy,
                               int32_t visible_block, int32_t shift, int32_t steps,
                               const Engine& engine);

}  // namespace dlm
