// What to commit after a pass: the fields of a policy, said once, the policy in checked form, and
// its rules as pure functions.
//
// Definitions: LLaDA (arXiv:2502.09992), Fast-dLLM (arXiv:2505.22618), Dream (arXiv:2508.15487),
// SDAR (arXiv:2510.06303), entropy-bounded sampling (arXiv:2505.24857).
// exporter/dlm_export/network/reference.py states the same rules in plain torch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>
#include <vector>

#include "base/sized.h"
#include "dlm_runtime.h"

namespace dlm {

enum class Select { argmax, sample };
enum class Score { confidence, margin, entropy, random };
enum class Commit { statically, threshold, dynamic, factor, entropy_bound, timestep, sequential };
enum class Compare { at_least, above };
enum class Remask { none, edit };
enum class Cache { none, prefix, dual, block, block_dual };

// Of full attention, approximate: FULL_CACHES of exporter/dlm_export/network/passes.py.
constexpr bool is_full(Cache cache) { return cache == Cache::prefix || cache == Cache::dual; }

enum class Stop { eos, none };
enum class Store { pass, reuse, open };
enum class ScoreOf { prediction, draw, marginal };

// How callers spell a value of an enum.
template <class Enum>
struct Choice {
  const char* name;
  Enum value;
};

// All spellings of an enum's values, the default first. What is not listed is refused by name.
template <class Enum>
struct Choices;
template <>
struct Choices<Select> {
  static constexpr Choice<Select> all[] = {{"argmax", Select::argmax}, {"sample", Select::sample}};
};
template <>
struct Choices<Score> {
  static constexpr Choice<Score> all[] = {{"confidence", Score::confidence},
                                          {"margin", Score::margin},
                                          {"entropy", Score::entropy},
                                          {"random", Score::random}};
};
template <>
struct Choices<Commit> {
  static constexpr Choice<Commit> all[] = {{"static", Commit::statically},
                                           {"threshold", Commit::threshold},
                                           {"dynamic", Commit::dynamic},
                                           {"factor", Commit::factor},
                                           {"entropy_bound", Commit::entropy_bound},
                                           {"timestep", Commit::timestep},
                                           {"sequential", Commit::sequential}};
};
template <>
struct Choices<Compare> {
  static constexpr Choice<Compare> all[] = {{">=", Compare::at_least}, {">", Compare::above}};
};
template <>
struct Choices<Remask> {
  static constexpr Choice<Remask> all[] = {{"none", Remask::none}, {"edit", Remask::edit}};
};
template <>
struct Choices<Cache> {
  static constexpr Choice<Cache> all[] = {{"none", Cache::none},
                                          {"prefix", Cache::prefix},
                                          {"dual", Cache::dual},
                                          {"block", Cache::block},
                                          {"block-dual", Cache::block_dual}};
};
template <>
struct Choices<Stop> {
  static constexpr Choice<Stop> all[] = {{"eos", Stop::eos}, {"none", Stop::none}};
};
template <>
struct Choices<Store> {
  static constexpr Choice<Store> all[] = {
      {"pass", Store::pass}, {"reuse", Store::reuse}, {"open", Store::open}};
};
template <>
struct Choices<ScoreOf> {
  static constexpr Choice<ScoreOf> all[] = {{"prediction", ScoreOf::prediction},
                                            {"draw", ScoreOf::draw},
                                            {"marginal", ScoreOf::marginal}};
};

// Every field of a policy in the order of dlm_policy, which this table must cover (decode/policy.cc
// asserts it). From it follow the defaults, the checks, the presets that a manifest may hold, and
// what dlm_policy_field_at tells of them.
//   CHOICE(name, enum)   NUMBER(name, type, default, lowest, highest)
#define DLM_POLICY_FIELDS(CHOICE, NUMBER)          \
  CHOICE(select, Select)                           \
  CHOICE(score, Score)                             \
  CHOICE(commit, Commit)                           \
  CHOICE(compare, Compare)                         \
  CHOICE(remask, Remask)                           \
  CHOICE(cache, Cache)                             \
  CHOICE(stop, Stop)                               \
  NUMBER(block_length, int32_t, 32, 0, 1 << 24)    \
  NUMBER(steps_per_block, int32_t, 0, 0, 1 << 24)  \
  NUMBER(refresh, int32_t, 0, 0, 1 << 24)          \
  NUMBER(threshold, double, 0.9, 0, 1)             \
  NUMBER(factor, double, 1, 0, 1e9)                \
  NUMBER(entropy_bound, double, 0.1, 0, 1e9)       \
  NUMBER(timestep_eps, double, 1e-3, 1e-9, 1)      \
  NUMBER(temperature, double, 0, 0, 1e300)         \
  NUMBER(seed, uint64_t, 0, 0, UINT64_MAX)         \
  CHOICE(store, Store)                             \
  NUMBER(sub_block_length, int32_t, 0, 0, 1 << 24) \
  NUMBER(edit_passes, int32_t, 16, 0, 1 << 24)     \
  NUMBER(edit_threshold, double, 0.9, 0, 1)        \
  NUMBER(top_p, double, 1, 0, 1)                   \
  NUMBER(top_k, int32_t, 0, 0, 1 << 24)            \
  CHOICE(score_of, ScoreOf)                        \
  NUMBER(cfg_scale, double, 0, 0, 1000)

// A policy whose values and combinations were checked; dlm_runtime.h says what they mean.
struct Policy {
#define DLM_CHOICE(field, type) type field;
#define DLM_NUMBER(field, type, ...) type field;
  DLM_POLICY_FIELDS(DLM_CHOICE, DLM_NUMBER)
#undef DLM_CHOICE
#undef DLM_NUMBER
};

// The spellings alone, nullptr behind the last.
template <class Enum>
inline constexpr auto kChoiceNames = [] {
  std::array<const char*, std::size(Choices<Enum>::all) + 1> names{};
  for (size_t i = 0; i + 1 < names.size(); ++i) names[i] = Choices<Enum>::all[i].name;
  return names;
}();

template <class Number>
inline constexpr int32_t kKind = std::is_same_v<Number, int32_t>  ? DLM_FIELD_INT32
                                 : std::is_same_v<Number, double> ? DLM_FIELD_DOUBLE
                                                                  : DLM_FIELD_UINT64;

inline constexpr dlm_policy_field kPolicyFields[] = {
#define DLM_CHOICE(field, type) \
  {sizeof(dlm_policy_field),    \
   #field,                      \
   DLM_FIELD_CHOICE,            \
   offsetof(dlm_policy, field), \
   kChoiceNames<type>.data(),   \
   0,                           \
   0,                           \
   0},
#define DLM_NUMBER(field, type, initial, lowest, highest) \
  {sizeof(dlm_policy_field),                              \
   #field,                                                \
   kKind<type>,                                           \
   offsetof(dlm_policy, field),                           \
   nullptr,                                               \
   initial,                                               \
   lowest,                                                \
   static_cast<double>(highest)},
    DLM_POLICY_FIELDS(DLM_CHOICE, DLM_NUMBER)
#undef DLM_CHOICE
#undef DLM_NUMBER
};

constexpr size_t field_bytes(int32_t kind) {
  return kind == DLM_FIELD_CHOICE  ? sizeof(const char*)
         : kind == DLM_FIELD_INT32 ? sizeof(int32_t)
                                   : 8;
}

// LLaDA's: static, confidence, blocks of 32, no cache. Its strings are static.
dlm_policy default_policy();

// The canonical static string of a field's value, or nullptr where the value is none of the field's
// choices.
const char* canonical_choice(const dlm_policy_field& field, const std::string& value);

// Sets a field whose kind has that type.
template <class Value>
void set_field(dlm_policy& policy, const dlm_policy_field& field, Value value) {
  std::memcpy(reinterpret_cast<char*>(&policy) + field.offset, &value, sizeof value);
}

// Checks a caller's policy, of any known size: its fields and their combinations. Throws
// Error(DLM_INVALID_ARGUMENT or DLM_UNSUPPORTED) that lists the choices.
Policy check_policy(const dlm_policy& policy);

// Planned commits of `step` when `masked` positions are split over `steps` as evenly as integers
// allow, larger first.
int32_t even_count(int32_t masked, int32_t step, int32_t steps);

// Dream's share of the positions that are masked now, in fp32 as published; all of them at the last
// step, never none.
int32_t timestep_count(int32_t masked, int32_t step, int32_t steps, double eps);

// Orders indices into scores by what commits first (score descending, position ascending; by
// position alone for sequential) and returns how many of them to commit: at least 1 unless there is
// none. scores are in order of position.
int32_t choose(const Policy& policy, const std::vector<double>& scores, int32_t planned,
               std::vector<int32_t>& order);

}  // namespace dlm
