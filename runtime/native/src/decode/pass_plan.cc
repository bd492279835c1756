#include "decode/pass_plan.h"

#include <algorithm>

#include "base/error.h"

namespace dlm {
namespace {

struct Block {
  Range range;
  int32_t steps;
};

bool has_undecided(const std::vector<uint8_t>& undecided, Range range) {
  const auto last = undecided.begin() + range.last;
  return std::find(undecided.begin() + range.first, last, 1) != last;
}

// Finds the blocks that have an undecided position.
std::vector<Block> find_blocks(const std::vector<uint8_t>& undecided, const Policy& policy,
                               const Denoiser& denoiser, int32_t steps) {
  std::vector<Block> blocks;
  const auto length = static_cast<int32_t>(undecided.size());
  auto origin =
      static_cast<int32_t>(std::find(undecided.begin(), undecided.end(), 1) - undecided.begin());
  const int32_t block_length =
      policy.block_length > 0 ? policy.block_length : std::max(1, length - origin);
  if (denoiser.visible_block > 1 && !denoiser.blocks_after_prompt) origin -= origin % block_length;
  const auto count =
      static_cast<int32_t>((int64_t{length} - origin + block_length - 1) / block_length);
  if (steps > 0 && steps < count)
    fail(DLM_INVALID_ARGUMENT,
         "steps = %d is fewer than the %d blocks of %d tokens: every block needs a step", steps,
         count, block_length);
  for (int32_t number = 0; number < count; ++number) {
    const int32_t start = origin + number * block_length;
    const auto end = static_cast<int32_t>(std::min<int64_t>(int64_t{start} + block_length, length));
    if (!has_undecided(undecided, {start, end})) continue;
    blocks.push_back({{start, end},
                      steps > 0                    ? even_count(steps, number, count)
                      : policy.steps_per_block > 0 ? policy.steps_per_block
                                                   : block_length});
  }
  return blocks;
}

std::vector<Stage> plan_full(const std::vector<Block>& blocks, const Policy& policy, int32_t length,
                             int32_t shift) {
  std::vector<Stage> plan;
  const Range whole{0, length};
  const Block* before = nullptr;
  for (const Block& block : blocks) {
    const auto add = [&](Range rows, bool is_stored, bool is_repeated) {
      const int32_t cached = length - rows.tokens();
      const CacheUse use = is_stored    ? (cached > 0 ? CacheUse::refresh : CacheUse::write)
                           : cached > 0 ? CacheUse::read
                                        : CacheUse::none;
      const Range awaited = is_repeated ? block.range : Range{};
      plan.push_back({rows, cached, use, is_stored ? PassKind::prefill : PassKind::denoise,
                      block.range, awaited, block.steps, block.range, is_repeated, false, shift});
    };
    const int32_t start = block.range.first,
                  last = policy.cache == Cache::prefix ? length : block.range.last;
    // With next_block below 1, the request chooses the rows of each pass (Request::choose_rows).
    if (policy.cache == Cache::none || policy.next_block < 1) {
      add(policy.cache == Cache::block ? block.range : whole, false, true);
      continue;
    }
    const bool is_whole = policy.refresh == 0 || before == nullptr;
    add(is_whole ? whole
                 : Range{std::max(0, std::min(start - policy.refresh, before->range.first)), last},
        true, false);
    add({start, last}, false, true);
    before = &block;
  }
  return plan;
}

// Returns how many of the `tokens` tokens the engine can compute in one pass that also reads
// `cached` cached tokens. The number is a multiple of the block length. If not even one block fits,
// returns `tokens`.
int32_t tokens_at_once(const Engine& engine, int32_t tokens, int32_t cached, int32_t block_length) {
  for (int32_t most = tokens; most > 0; most = (most - 1) / block_length * block_length)
    if (engine.max_rows(most, cached) > 0) return most;
  return tokens;
}

std::vector<Stage> plan_block_causal(const std::vector<Block>& blocks,
                                     const std::vector<uint8_t>& undecided, const Policy& policy,
                                     const Denoiser& denoiser, const Engine& engine) {
  std::vector<Stage> plan;
  const bool has_drafts = denoiser.draft_block > 0;
  const int32_t shift = causal_shift(policy, denoiser);
  const Range whole{0, static_cast<int32_t>(undecided.size())};
  const bool has_cache = policy.cache != Cache::none,
             has_parts = policy.cache == Cache::block_dual && policy.sub_block_length > 0;
  int32_t stored = 0;
  for (const Block& block : blocks) {
    const auto [start, end] = block.range;
    // A shifted denoiser predicts the first position of a block in the row just before the block.
    // With a cache, the pass that stores this row also scores it. Without a cache, an extra pass
    // scores this row, so that the result is the same as with a cache.
    const PassKind before = &block == &blocks.front() ? PassKind::prefill : PassKind::store;
    const int32_t size =
        policy.sub_block_length > 0 ? policy.sub_block_length : block.range.tokens();
    const int32_t count = (block.range.tokens() + size - 1) / size;
    const auto steps_of = [&](int32_t number) {
      return std::max(1, even_count(block.steps, number, count));
    };
    const Range opened{start, std::min(start + size, end)};
    const bool is_opened = policy.store == Store::open && has_undecided(undecided, opened);
    const auto add = [&](Range rows, int32_t cached, CacheUse use, PassKind kind, Range decided,
                         Range awaited, int32_t steps, bool is_last = false) {
      const bool is_draft = has_drafts && kind == PassKind::denoise;
      plan.push_back({rows, cached, use, kind, decided, awaited, steps, block.range, is_last,
                      is_draft, is_draft ? denoiser.shift : shift});
    };
    const Range once{};
    while (has_cache && stored < start) {
      const int32_t wanted = is_opened ? end : start;
      // If a prompt is one block, one pass computes it.
      const int32_t least = denoiser.splits_prompts() ? denoiser.visible_block : wanted - stored;
      const int32_t at_once = stored + tokens_at_once(engine, wanted - stored, stored, least);
      if (is_opened && at_once == end) {
        // This pass also stores the rows of the block itself. Later passes over the block overwrite
        // these rows.
        add({stored, end}, stored, CacheUse::append, before, opened, once, steps_of(0));
        stored = start;
        break;
      }
      const int32_t last = std::min(at_once, start);
      const Range decided{start, last == start ? start + shift : start};
      add({stored, last}, stored, CacheUse::append, before, decided, once, 1);
      stored = last;
    }
    if (!has_cache && shift > 0 && start > 0)
      add(whole, 0, CacheUse::none, PassKind::denoise, {start, start + shift}, once, 1);
    const Range rows = has_cache ? block.range : whole;
    const int32_t cached = has_cache ? start : 0;
    const CacheUse use = policy.store == Store::reuse ? CacheUse::append
                         : cached > 0                 ? CacheUse::read
                                                      : CacheUse::none;
    for (int32_t number = 0; number < count; ++number) {
      const Range decided{start + number * size, std::min(start + (number + 1) * size, end)};
      const int32_t steps = steps_of(number);
      const bool is_last = number == count - 1;
      if (!has_parts) {
        add(rows, cached, use, PassKind::denoise, decided, decided, steps, is_last);
        continue;
      }
      // A shifted denoiser predicts the first position of the sub-block in the row before the
      // sub-block. So passes over the whole block repeat until this position is decided.
      if (has_undecided(undecided, decided))
        add(rows, cached, CacheUse::append, PassKind::prefill, decided,
            {decided.first, decided.first + shift}, steps);
      const int32_t around = end - decided.tokens();
      add(decided, around, around > 0 ? CacheUse::read : CacheUse::none, PassKind::denoise, decided,
          decided, steps, is_last);
    }
    if (policy.store == Store::reuse) stored = end;
  }
  return plan;
}

// Plans the passes that store the prompt and decide the first position, for the commit rule
// `verify`. If the denoiser has shifted drafts, plans the passes that store the prompt except its
// last token, and the draft pass of the first block.
std::vector<Stage> plan_prompt(const std::vector<uint8_t>& undecided, const Policy& policy,
                               const Denoiser& denoiser, int32_t steps, const Engine& engine) {
  std::vector<Stage> plan;
  const auto length = static_cast<int32_t>(undecided.size());
  const auto start =
      static_cast<int32_t>(std::find(undecided.begin(), undecided.end(), 1) - undecided.begin());
  if (start == length) return plan;
  const char* const commit = kCommitNames[static_cast<size_t>(policy.commit)];
  if (steps > 0)
    fail(DLM_INVALID_ARGUMENT,
         "steps = %d, but with commit = \"%s\" the text decides the number of passes: use steps = "
         "0, or set max_steps",
         steps, commit);
  if (start == 0)
    fail(DLM_UNSUPPORTED,
         "policy: commit = \"%s\" needs a prompt of at least one token, because each token is "
         "predicted from the tokens before it",
         commit);
  if (std::find(undecided.begin() + start, undecided.end(), 0) != undecided.end())
    fail(DLM_UNSUPPORTED,
         "policy: commit = \"%s\" generates from left to right, but position %d is to be filled "
         "before tokens that are given: %s",
         commit, start,
         denoiser.has_shifted_drafts ? "give only tokens before the new ones"
                                     : "use another rule, such as \"threshold\"");
  if (denoiser.has_shifted_drafts) {
    const Range block{start, std::min(start + policy.block_length, length)}, none{start, start};
    for (int32_t stored = 0; stored < start - 1;) {
      const int32_t end = stored + tokens_at_once(engine, start - 1 - stored, stored, 1);
      plan.push_back({{stored, end},
                      stored,
                      CacheUse::append,
                      PassKind::prefill,
                      none,
                      {},
                      1,
                      block,
                      false,
                      false,
                      1});
      stored = end;
    }
    plan_prefix(plan, policy, start - 1, start, length);
    return plan;
  }
  const Range first{start, start + 1};
  for (int32_t stored = 0; stored < start;) {
    const int32_t end = stored + tokens_at_once(engine, start - stored, stored, 1);
    plan.push_back({{stored, end},
                    stored,
                    CacheUse::append,
                    PassKind::prefill,
                    {start, end == start ? start + 1 : start},
                    {},
                    1,
                    first,
                    end == start,
                    false,
                    causal_shift(policy, denoiser)});
    stored = end;
  }
  return plan;
}

// Checks the policy of a denoiser that changes the length of canvases. Its canvases are one block,
// and every pass runs the whole canvas, because tokens move after a change.
void suit_resizing(const Policy& policy) {
  const auto refuse = [](const char* field, const char* use) {
    fail(DLM_UNSUPPORTED,
         "policy: %s does not suit this denoiser, which changes the length of canvases: use %s",
         field, use);
  };
  if (policy.cache != Cache::none) refuse("this cache", "cache = \"none\"");
  if (policy.block_length > 0) refuse("block_length above 0", "block_length = 0");
  if (policy.next_block < 1) refuse("next_block below 1", "next_block = 1");
  if (policy.remask != Remask::none) refuse("this remask", "remask = \"none\"");
  if (policy.stop == Stop::early_eos) refuse("stop = \"early-eos\"", "stop = \"eos\" or \"none\"");
  if (policy.reserve != Reserve::none) refuse("a reserved end", "reserve = \"none\"");
  if (policy.cfg_scale > 0) refuse("guidance", "cfg_scale = 0");
}

}  // namespace

Policy suit_policy(Policy policy, const Denoiser& denoiser) {
  const char* const cache = kCacheNames[static_cast<size_t>(policy.cache)];
  const int32_t visible_block = denoiser.visible_block, shift = causal_shift(policy, denoiser);
  if (denoiser.has_causal_drafts() && policy.commit != Commit::verify)
    fail(
        DLM_UNSUPPORTED,
        "policy: commit = \"%s\" does not suit this denoiser, which is autoregressive and verifies "
        "its drafts: use commit = \"verify\"",
        kCommitNames[static_cast<size_t>(policy.commit)]);
  if (denoiser.has_shifted_drafts) {
    if (policy.commit != Commit::longest_prefix)
      fail(DLM_UNSUPPORTED,
           "policy: commit = \"%s\" does not suit this denoiser, whose draft passes predict the "
           "next positions: use commit = \"longest_prefix\"",
           kCommitNames[static_cast<size_t>(policy.commit)]);
    check_left_to_right(policy);
  }
  if (!denoiser.has_mask_token() && !denoiser.has_causal_drafts() && policy.remask != Remask::noise)
    fail(DLM_UNSUPPORTED,
         "policy: remask = \"%s\" does not suit this denoiser, which has no mask token and starts "
         "from random tokens: use remask = \"noise\"",
         kRemaskNames[static_cast<size_t>(policy.remask)]);
  if (denoiser.rewrites() != (policy.remask == Remask::rewrite))
    fail(DLM_UNSUPPORTED,
         "policy: remask = \"%s\" does not suit this denoiser, which has %s: use %s",
         kRemaskNames[static_cast<size_t>(policy.remask)],
         denoiser.rewrites() ? "delete and split tokens" : "no split token",
         denoiser.rewrites() ? "remask = \"rewrite\"" : "remask = \"edit\" or \"none\"");
  if (denoiser.draft_block > 0) {
    if (policy.cache != Cache::block)
      fail(DLM_UNSUPPORTED,
           "policy: cache = \"%s\" does not suit this denoiser, which has draft passes and causal "
           "passes: use cache = \"block\"",
           cache);
    if (policy.block_length == 0) policy.block_length = denoiser.draft_block;
  } else if (policy.commit == Commit::verify) {
    fail(DLM_UNSUPPORTED,
         "policy: commit = \"verify\" needs draft passes, and this denoiser has no draft passes: "
         "use "
         "another rule, such as \"threshold\"");
  }
  if (denoiser.resizes()) suit_resizing(policy);
  if (visible_block == 0) {
    if (policy.cache == Cache::block || policy.cache == Cache::block_dual)
      fail(DLM_UNSUPPORTED,
           "policy: cache = \"%s\" needs block-causal attention, but this denoiser's is full: use "
           "cache = \"dual\", \"prefix\" or \"none\"",
           cache);
    if (policy.sub_block_length > 0)
      fail(DLM_UNSUPPORTED,
           "policy: sub_block_length = %d needs block-causal attention, but this denoiser's is "
           "full: set block_length = %d instead",
           policy.sub_block_length, policy.sub_block_length);
  } else {
    const bool is_bidirectional = visible_block > 1 && denoiser.shift == 0;
    if (policy.next_block < 1 && !is_bidirectional && !denoiser.blocks_after_prompt)
      fail(
          DLM_UNSUPPORTED,
          "policy: next_block = %.10g needs a denoiser whose rows predict their own positions, and "
          "see all positions of their block: use next_block = 1",
          policy.next_block);
    if (is_full(policy.cache))
      fail(DLM_UNSUPPORTED,
           "policy: cache = \"%s\" needs full attention, but this denoiser's is block-causal, in "
           "blocks of %d: use cache = \"block\", which is exact, or \"none\"",
           cache, visible_block);
    if (policy.block_length % visible_block != 0)
      fail(DLM_INVALID_ARGUMENT,
           "policy: block_length = %d does not suit this denoiser, whose attention is block-causal "
           "in blocks of %d: set a multiple of %d, or 0 for %d; to decide fewer positions at a "
           "time, set sub_block_length",
           policy.block_length, visible_block, visible_block, visible_block);
    if (policy.block_length == 0) policy.block_length = visible_block;
    if (policy.sub_block_length > 0 && policy.block_length % policy.sub_block_length != 0)
      fail(DLM_INVALID_ARGUMENT,
           "policy: sub_block_length = %d does not divide the block of %d positions: give a "
           "divisor, or 0",
           policy.sub_block_length, policy.block_length);
    if (policy.cache == Cache::block_dual) {
      if (policy.block_length != visible_block)
        fail(DLM_UNSUPPORTED,
             "policy: cache = \"block-dual\" keeps rows of the current block, and in this denoiser "
             "a block is %d positions that see each other: use block_length = %d, or cache "
             "= \"block\"",
             visible_block, visible_block);
      if (policy.remask == Remask::edit)
        fail(DLM_UNSUPPORTED,
             "policy: remask = \"edit\" scores whole blocks, but cache = \"block-dual\" "
             "runs parts of them: use cache = \"block\"");
    }
  }
  if (shift == 0) return policy;
  if (policy.next_block < 1 && policy.cache == Cache::prefix)
    fail(DLM_UNSUPPORTED,
         "policy: next_block = %.10g with a cache needs each row to predict its own position, but "
         "this denoiser's rows predict the next position: use cache = \"none\"",
         policy.next_block);
  if (policy.remask == Remask::noise && visible_block > 0)
    fail(DLM_UNSUPPORTED,
         "policy: remask = \"noise\" needs each row to predict its own position, but this "
         "denoiser's rows predict the next position: use remask = \"none\"");
  if (policy.remask == Remask::edit)
    fail(DLM_UNSUPPORTED,
         "policy: remask = \"edit\" needs each row to predict its own position, but this "
         "denoiser's rows predict the next position: use remask = \"none\"");
  if (policy.store != Store::pass)
    fail(DLM_UNSUPPORTED,
         "policy: store = \"%s\" skips the pass that predicts a block's first position, because "
         "this denoiser's rows predict the next position: use store = \"pass\"",
         kStoreNames[static_cast<size_t>(policy.store)]);
  return policy;
}

std::vector<Stage> plan_passes(const std::vector<uint8_t>& undecided, const Policy& policy,
                               const Denoiser& denoiser, int32_t steps, const Engine& engine) {
  const auto length = static_cast<int32_t>(undecided.size());
  if (policy.commit == Commit::verify || denoiser.has_shifted_drafts)
    return plan_prompt(undecided, policy, denoiser, steps, engine);
  const std::vector<Block> blocks = find_blocks(undecided, policy, denoiser, steps);
  return denoiser.visible_block == 0 || policy.next_block < 1
             ? plan_full(blocks, policy, length, denoiser.shift)
             : plan_block_causal(blocks, undecided, policy, denoiser, engine);
}

void plan_verified(std::vector<Stage>& plan, const Policy& policy, const Denoiser& denoiser,
                   int32_t start, int32_t length, int32_t drafts) {
  const auto end_of_block = [&](int32_t first) {
    return static_cast<int32_t>(std::min<int64_t>(int64_t{first} + policy.block_length, length));
  };
  const Range once{};
  if (denoiser.has_causal_drafts()) {
    // No row drafts the last position of the next block. The pass that verifies the block predicts
    // it.
    const int32_t end = start + drafts + 1, drafted = std::max(end, end_of_block(end) - 1);
    plan.push_back({{start - 1, drafted - 1},
                    start - 1,
                    CacheUse::append,
                    PassKind::verify,
                    {start, end},
                    once,
                    1,
                    {start, end},
                    true,
                    false,
                    1,
                    false,
                    0,
                    {end, drafted}});
    return;
  }
  // The draft pass does not predict the last position of the block. The last row of the causal pass
  // predicts this position.
  const int32_t end = end_of_block(start);
  const Range rows{start - 1, end - 1}, block{start, end};
  if (end - start > 1)
    plan.push_back({rows,
                    rows.first,
                    CacheUse::read,
                    PassKind::denoise,
                    {start, end - 1},
                    once,
                    1,
                    block,
                    false,
                    true,
                    denoiser.shift,
                    denoiser.has_draft_updates});
  plan.push_back({rows, rows.first, CacheUse::append, PassKind::verify, block, once, 1, block, true,
                  false, 1});
}

void plan_prefix(std::vector<Stage>& plan, const Policy& policy, int32_t stored, int32_t start,
                 int32_t length) {
  const auto end =
      static_cast<int32_t>(std::min<int64_t>(int64_t{start} + policy.block_length, length));
  const Range block{start, end};
  // The first drafted row is the last decided token, at start - 1. A later pass stores its row
  // again.
  plan.push_back({{stored, end - 1},
                  stored,
                  CacheUse::append,
                  PassKind::denoise,
                  block,
                  {},
                  1,
                  block,
                  true,
                  true,
                  1,
                  false,
                  start - 1 - stored});
}

}  // namespace dlm
