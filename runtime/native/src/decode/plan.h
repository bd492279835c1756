// The plan of a request's passes: which rows each computes, reads from the cache, and stores.
//
// Caches. `none` runs the whole canvas in every pass. `prefix` and `dual` (Fast-dLLM,
// arXiv:2505.22618) run it once per block. The block's other passes run [block start, end of
// canvas) or the block alone, and read the keys and values of all other positions. With `refresh`,
// only the first block's opening pass runs the whole canvas. A later one also runs the block before
// (or `refresh` tokens, if that is more), so no kept row is of a mask token filled since. `block`
// (SDAR, arXiv:2510.06303) is exact for block-causal attention: passes run one block over the
// finished blocks, which one pass each stores. `block-dual` (Fast-dLLM v2, arXiv:2509.26328) is
// `dual` within a block: a pass over the block opens each sub-block, and the other passes run the
// sub-block alone. exporter/dlm_export/network/passes.py implements the same plan.
//
// Invariants that requests and pass makers rely on. Blocks come in order, and the stages of a block
// are contiguous. A request goes through the stages once, skips those without work, and never goes
// back. An earlier stage has kept all that a stage reads: `append` reads the positions before
// `rows`; `read` and `refresh` read all but `rows` (up to the block's end, for block-causal
// attention). Each undecided position of a block is in `decided` of one of its repeated stages.
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

// For dlm_stats. prefill: fills or refreshes the cache for a block. store: stores a finished one.
enum class PassKind { prefill, denoise, store };

// Passes of one kind over one range.
struct Stage {
  Range rows;      // positions that they compute
  int32_t cached;  // number of other positions that they read
  CacheUse use;    // whether they keep their own rows
  PassKind kind;
  bool is_repeated;  // until all of `decided` is decided; otherwise one pass
  Range decided;     // positions that they score and commit; may be empty if rows are stored
  int32_t steps;     // number of passes planned for `decided`
  Range block;       // the block of these positions; `is_last` marks its last stage
  bool is_last;
};

// Sets the policy's block length for a denoiser with this visible_block (see dlm_denoiser) and
// shift. Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED) if the policy does not suit it.
Policy suit_policy(Policy policy, int32_t visible_block, int32_t shift);

// Plans the passes that decide a canvas's undecided positions, block by block. `policy` comes from
// suit_policy. Blocks count from the first undecided position, or from position 0 if attention is
// block-causal. steps > 0 sets the number of passes for the whole generation. Given tokens are
// stored in as few passes as the engine allows. Throws Error(DLM_INVALID_ARGUMENT).
std::vector<Stage> plan_passes(const std::vector<uint8_t>& undecided, const Policy& policy,
                               int32_t visible_block, int32_t shift, int32_t steps,
                               const Engine& engine);

}  // namespace dlm
