#include "decode/policy.h"

#include <algorithm>

#include "base/error.h"

namespace dlm {
namespace {

// Returns true if kPolicyFields lists all members of dlm_policy, in the same order and without gaps
// between the members.
constexpr bool covers_dlm_policy() {
  size_t end = sizeof(dlm_policy::struct_size);
  for (const dlm_policy_field& field : kPolicyFields) {
    const size_t bytes = field_bytes(field.kind);
    if (field.offset != (end + bytes - 1) / bytes * bytes) return false;
    end = field.offset + bytes;
  }
  return (end + alignof(dlm_policy) - 1) / alignof(dlm_policy) * alignof(dlm_policy) ==
         sizeof(dlm_policy);
}
static_assert(covers_dlm_policy(),
              "DLM_POLICY_FIELDS must list the fields of dlm_policy in the same order");

template <class Enum>
void check(const char* name, const char* given, const char* const* names, Enum& value) {
  std::string known;
  for (int number = 0; names[number] != nullptr; ++number) {
    value = static_cast<Enum>(number);
    if (given != nullptr && std::strcmp(given, names[number]) == 0) return;
    known += std::string(number == 0 ? "" : ", ") + names[number];
  }
  fail(DLM_INVALID_ARGUMENT, "policy: %s = \"%.40s\" is not one of: %s", name,
       given == nullptr ? "" : given, known.c_str());
}

template <class Number>
void check(const char* name, Number given, Number& value, double lowest, double highest) {
  const auto number = static_cast<double>(given);
  if (!(number >= lowest && number <= highest))
    fail(DLM_INVALID_ARGUMENT, "policy: %s = %.10g is outside %.10g..%.10g", name, number, lowest,
         highest);
  value = given;
}

// Checks the fields of a policy whose passes decide positions of several blocks.
void check_ahead(const Policy& policy, const char* commit) {
  if (policy.commit != Commit::threshold && policy.commit != Commit::entropy_threshold)
    fail(DLM_INVALID_ARGUMENT,
         "policy: next_block = %.10g needs commit = \"threshold\" or \"entropy_threshold\", not "
         "\"%s\": set one of these, or next_block = 1",
         policy.next_block, commit);
  if (policy.cache == Cache::dual || policy.cache == Cache::block_dual)
    fail(DLM_INVALID_ARGUMENT,
         "policy: next_block = %.10g decides positions of several blocks: use cache = \"none\", "
         "\"prefix\" or \"block\", or next_block = 1",
         policy.next_block);
  if (policy.store != Store::pass || policy.sub_block_length > 0)
    fail(DLM_INVALID_ARGUMENT,
         "policy: next_block = %.10g cannot be combined with %s, or use next_block = 1",
         policy.next_block,
         policy.store != Store::pass ? "this store: use store = \"pass\""
                                     : "sub-blocks: use sub_block_length = 0");
  if (policy.refresh > 0)
    fail(DLM_INVALID_ARGUMENT,
         "policy: next_block = %.10g cannot be combined with refresh: use refresh = 0 and "
         "refresh_interval, or next_block = 1",
         policy.next_block);
  if (policy.remask != Remask::none)
    fail(DLM_INVALID_ARGUMENT,
         "policy: next_block = %.10g cannot be combined with edits: use remask = \"none\", or "
         "next_block = 1",
         policy.next_block);
}

// Checks the fields of a policy that decides all positions of a block in its last pass.
void check_whole_blocks(const Policy& policy, const dlm_policy& given) {
  const auto refuse = [&](const char* field, const char* use) {
    fail(DLM_INVALID_ARGUMENT,
         "policy: remask = \"%s\" predicts all positions of a block in every pass, and cannot be "
         "combined with %s: use %s",
         given.remask, field, use);
  };
  if (policy.cache != Cache::none && policy.cache != Cache::block)
    refuse("this cache", "cache = \"block\" or \"none\"");
  if (policy.store != Store::pass) refuse("this store", "store = \"pass\"");
  if (policy.reserve != Reserve::none) refuse("a reserved end", "reserve = \"none\"");
  if (policy.sub_block_length > 0) refuse("sub-blocks", "sub_block_length = 0");
  if (policy.finish_threshold < 1) refuse("finish_threshold", "finish_threshold = 1");
  if (policy.remask == Remask::rewrite && policy.score != Score::confidence)
    refuse("this score", "score = \"confidence\", and a rule that does not compare entropies");
  if (policy.remask == Remask::noise && policy.cfg_scale > 0) refuse("guidance", "cfg_scale = 0");
}

// Checks the other fields of a policy that starts each block from random tokens. Until the last
// pass over a block, no position is decided. So rules that count decided positions are rejected.
void check_noise(const Policy& policy, const dlm_policy& given) {
  if (policy.commit != Commit::entropy_bound && policy.commit != Commit::threshold &&
      policy.commit != Commit::factor)
    fail(DLM_INVALID_ARGUMENT,
         "policy: remask = \"noise\" needs a rule that compares scores, and commit = \"%s\" is not "
         "one: use commit = \"entropy_bound\", \"threshold\" or \"factor\"",
         given.commit);
  if (policy.temperature_drop > policy.temperature)
    fail(DLM_INVALID_ARGUMENT,
         "policy: temperature_drop = %.10g is above temperature = %.10g, and temperatures cannot "
         "fall below 0: use a smaller temperature_drop",
         policy.temperature_drop, policy.temperature);
  if (policy.stable_entropy > 0 && policy.score != Score::entropy)
    fail(DLM_INVALID_ARGUMENT,
         "policy: stable_entropy = %.10g needs score = \"entropy\", not \"%s\": set that, or "
         "stable_entropy = 0",
         policy.stable_entropy, given.score);
}

}  // namespace

dlm_policy default_policy() {
  dlm_policy policy{};
  policy.struct_size = sizeof policy;
#define DLM_SET_CHOICE(field, type) policy.field = k##type##Names[0];
#define DLM_SET_NUMBER(field, type, initial, ...) policy.field = initial;
  DLM_POLICY_FIELDS(DLM_SET_CHOICE, DLM_SET_NUMBER)
  return policy;
}

const char* canonical_choice(const dlm_policy_field& field, const std::string& value) {
  for (const char* const* known = field.choices; *known != nullptr; ++known)
    if (value == *known) return *known;
  return nullptr;
}

void check_left_to_right(const Policy& policy) {
  const auto refuse = [&](const char* field, const char* use) {
    fail(DLM_INVALID_ARGUMENT,
         "policy: commit = \"%s\" generates tokens from left to right, and cannot be combined "
         "with %s: use %s",
         kCommitNames[static_cast<size_t>(policy.commit)], field, use);
  };
  if (policy.cache != Cache::block) refuse("this cache", "cache = \"block\"");
  if (policy.score != Score::confidence) refuse("this score", "score = \"confidence\"");
  if (policy.remask != Remask::none) refuse("edits", "remask = \"none\"");
  if (policy.store != Store::pass) refuse("this store", "store = \"pass\"");
  if (policy.reserve != Reserve::none) refuse("a reserved end", "reserve = \"none\"");
  if (policy.cfg_scale > 0) refuse("guidance", "cfg_scale = 0");
  if (policy.sub_block_length > 0) refuse("sub-blocks", "sub_block_length = 0");
  if (policy.steps_per_block > 0) refuse("a number of steps", "steps_per_block = 0");
}

Policy check_policy(const dlm_policy& given) {
  const dlm_policy policy = take(given, default_policy(), "dlm_policy");
  Policy out{};
#define DLM_CHECK_CHOICE(field, type) check(#field, policy.field, k##type##Names, out.field);
#define DLM_CHECK_NUMBER(field, type, initial, lowest, highest) \
  check(#field, policy.field, out.field, lowest, static_cast<double>(highest));
  DLM_POLICY_FIELDS(DLM_CHECK_CHOICE, DLM_CHECK_NUMBER)
  if (out.reuse_prompt != 0 && (!is_full(out.cache) || out.refresh == 0))
    fail(DLM_INVALID_ARGUMENT,
         "policy: reuse_prompt = 1 needs cache = \"prefix\" or \"dual\" and refresh above 0: with "
         "refresh = 0, every block computes the whole prompt again");
  if (out.refresh > 0 && !is_full(out.cache))
    fail(DLM_INVALID_ARGUMENT,
         "policy: refresh = %d, but cache = \"%s\" keeps no rows to refresh: use cache = "
         "\"prefix\" or \"dual\", or refresh = 0",
         out.refresh, policy.cache);
  if (out.store != Store::pass && out.cache != Cache::block)
    fail(DLM_INVALID_ARGUMENT, "policy: store = \"%s\" needs cache = \"block\", not \"%s\"",
         policy.store, policy.cache);
  if (out.select == Select::argmax && out.temperature > 0)
    fail(DLM_INVALID_ARGUMENT,
         "policy: temperature = %.10g needs select = \"sample\": set that, or temperature = 0",
         out.temperature);
  if (out.select == Select::sample && out.temperature == 0)
    fail(DLM_INVALID_ARGUMENT,
         "policy: select = \"sample\" needs a temperature above 0: set one, or select = "
         "\"argmax\"");
  if (compares_fractions(out.commit) && out.score == Score::entropy)
    fail(DLM_INVALID_ARGUMENT,
         "policy: commit = \"%s\" needs scores in 0..1, and entropies are not: use score = "
         "\"confidence\"",
         policy.commit);
  // No field may change the tokens that the denoiser predicts or draws one at a time.
  if (out.commit == Commit::verify) check_left_to_right(out);
  if (out.next_block < 1) check_ahead(out, policy.commit);
  const bool is_delayed = out.next_block < 1 && out.cache == Cache::prefix;
  if ((out.cache_delay > 0 || out.refresh_interval > 0) && !is_delayed)
    fail(DLM_INVALID_ARGUMENT,
         "policy: cache_delay and refresh_interval need cache = \"prefix\" and next_block below 1: "
         "set both, or use cache_delay = 0 and refresh_interval = 0. With next_block = 0.9999, a "
         "block starts when the previous block is finished");
  if (out.commit == Commit::entropy_threshold && out.cache == Cache::prefix && !is_delayed)
    fail(DLM_INVALID_ARGUMENT,
         "policy: commit = \"entropy_threshold\" with cache = \"prefix\" and next_block = 1 would "
         "run Fast-dLLM's cache, not d3LLM's: set next_block = 0.9999, so that a block starts when "
         "the previous block is finished, or use commit = \"threshold\" for Fast-dLLM's loop");
  if (compares_entropies(out.commit)) out.score = Score::entropy;
  if (out.remask == Remask::noise || out.remask == Remask::rewrite) check_whole_blocks(out, policy);
  if (out.remask == Remask::noise) {
    check_noise(out, policy);
  } else if (out.temperature_drop > 0 || out.stable_entropy > 0) {
    fail(DLM_INVALID_ARGUMENT,
         "policy: %s = %.10g needs remask = \"noise\", not \"%s\": set that, or 0",
         out.temperature_drop > 0 ? "temperature_drop" : "stable_entropy",
         out.temperature_drop > 0 ? out.temperature_drop : out.stable_entropy, policy.remask);
  }
  return out;
}

double temperature_of(const Policy& policy, int32_t step, int32_t steps) {
  if (policy.select == Select::argmax) return 1;
  if (policy.temperature_drop == 0) return policy.temperature;
  const float share = static_cast<float>(steps - step) / static_cast<float>(steps);
  // The limit keeps the conversion to fp32 from overflowing.
  const double lowest = std::min(policy.temperature - policy.temperature_drop, 1e30);
  const float added = static_cast<float>(policy.temperature_drop) * share;
  return static_cast<float>(lowest) + added;
}

}  // namespace dlm
