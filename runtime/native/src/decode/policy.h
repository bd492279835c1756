// A policy contains the settings of the decoding loop. This file defines and checks the fields of a
// policy.
//
// A policy is checked twice. check_policy checks the fields of the policy and the combinations of
// fields. suit_policy (decode/pass_plan.h) checks that the policy suits the denoiser.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/sized.h"
#include "decode/commit_rules.h"
#include "dlm_runtime.h"

namespace dlm {

// Each enum is followed by an array of its values' names. The names are in the order of the enum,
// and NULL ends the array. The first value of each enum is the default.
enum class Select { argmax, sample };
inline constexpr const char* kSelectNames[] = {"argmax", "sample", nullptr};
enum class Score { confidence, margin, entropy, random };
inline constexpr const char* kScoreNames[] = {"confidence", "margin", "entropy", "random", nullptr};
enum class Compare { at_least, above };
inline constexpr const char* kCompareNames[] = {">=", ">", nullptr};
enum class Remask { none, edit, noise, rewrite };
inline constexpr const char* kRemaskNames[] = {"none", "edit", "noise", "rewrite", nullptr};
enum class Cache { none, prefix, dual, block, block_dual };
inline constexpr const char* kCacheNames[] = {"none",  "prefix",     "dual",
                                              "block", "block-dual", nullptr};
enum class Stop { eos, none, early_eos };
inline constexpr const char* kStopNames[] = {"eos", "none", "early-eos", nullptr};
enum class Store { pass, reuse, open };
inline constexpr const char* kStoreNames[] = {"pass", "reuse", "open", nullptr};
enum class Schedule { masked, block, floor };
inline constexpr const char* kScheduleNames[] = {"masked", "block", "floor", nullptr};
enum class Reserve { none, end };
inline constexpr const char* kReserveNames[] = {"none", "end", nullptr};
enum class ScoreOf { prediction, draw, marginal };
inline constexpr const char* kScoreOfNames[] = {"prediction", "draw", "marginal", nullptr};

// Returns true for the caches that are used with full attention. Results with these caches differ
// from results without a cache. exporter/dlm_export/network/pass_plan.py calls these caches
// FULL_CACHES.
constexpr bool is_full(Cache cache) { return cache == Cache::prefix || cache == Cache::dual; }

// All fields of a policy, in the order of dlm_policy. Macros use this table to generate the
// defaults, the checks, the presets of manifests, and dlm_policy_field_at. decode/policy.cc asserts
// that the table lists every field.
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
  NUMBER(cfg_scale, double, 0, 0, 1000)            \
  CHOICE(schedule, Schedule)                       \
  CHOICE(reserve, Reserve)                         \
  NUMBER(reuse_prompt, int32_t, 0, 0, 1)           \
  NUMBER(next_block, double, 1, 0, 1)              \
  NUMBER(temperature_drop, double, 0, 0, 1e30)     \
  NUMBER(stable_entropy, double, 0, 0, 1e9)        \
  NUMBER(stable_passes, int32_t, 1, 0, 1 << 24)    \
  NUMBER(cache_delay, int32_t, 0, 0, 1 << 24)      \
  NUMBER(refresh_interval, int32_t, 0, 0, 1 << 24) \
  NUMBER(finish_threshold, double, 1, 0, 1)        \
  NUMBER(force_next, double, 1, 0, 1)

// A policy whose fields check_policy has checked. dlm_runtime.h documents the fields.
struct Policy {
#define DLM_CHOICE(field, type) type field;
#define DLM_NUMBER(field, type, ...) type field;
  DLM_POLICY_FIELDS(DLM_CHOICE, DLM_NUMBER)
#undef DLM_CHOICE
#undef DLM_NUMBER
};

template <class Number>
inline constexpr int32_t kKind = std::is_same_v<Number, int32_t>  ? DLM_FIELD_INT32
                                 : std::is_same_v<Number, double> ? DLM_FIELD_DOUBLE
                                                                  : DLM_FIELD_UINT64;

constexpr dlm_policy_field field_of(const char* name, int32_t kind, size_t offset,
                                    const char* const* choices, double initial, double lowest,
                                    double highest) {
  return {sizeof(dlm_policy_field), name, kind, offset, choices, initial, lowest, highest};
}

inline constexpr dlm_policy_field kPolicyFields[] = {
#define DLM_CHOICE(field, type) \
  field_of(#field, DLM_FIELD_CHOICE, offsetof(dlm_policy, field), k##type##Names, 0, 0, 0),
#define DLM_NUMBER(field, type, initial, lowest, highest)                              \
  field_of(#field, kKind<type>, offsetof(dlm_policy, field), nullptr, initial, lowest, \
           static_cast<double>(highest)),
    DLM_POLICY_FIELDS(DLM_CHOICE, DLM_NUMBER)
#undef DLM_CHOICE
#undef DLM_NUMBER
};

constexpr size_t field_bytes(int32_t kind) {
  return kind == DLM_FIELD_CHOICE  ? sizeof(const char*)
         : kind == DLM_FIELD_INT32 ? sizeof(int32_t)
                                   : 8;
}

// Returns LLaDA's policy, which is the default: commit "static", score "confidence", blocks of 32
// tokens, and no cache. The strings in the result are valid until the program ends.
dlm_policy default_policy();

// Returns the static string that equals `value`. Returns nullptr if `value` is not one of the
// choices of `field`.
const char* canonical_choice(const dlm_policy_field& field, const std::string& value);

// Sets a field of a dlm_policy. `Value` must be the C type that belongs to the field's kind.
template <class Value>
void set_field(dlm_policy& policy, const dlm_policy_field& field, Value value) {
  std::memcpy(reinterpret_cast<char*>(&policy) + field.offset, &value, sizeof value);
}

// Checks the fields of a policy that generates tokens from left to right, in blocks that start
// after the last decided token. Throws an Error with status DLM_INVALID_ARGUMENT.
void check_left_to_right(const Policy& policy);

// Checks the fields of a caller's policy and the combinations of fields. The caller's struct may
// have the size of any version that this library knows. Throws an Error with status
// DLM_INVALID_ARGUMENT or DLM_UNSUPPORTED. The message lists the valid choices.
Policy check_policy(const dlm_policy& policy);

// Returns the temperature of a pass. `step` is the number of earlier passes over the block, and
// `steps` the planned number of passes. With temperature_drop, the temperature falls linearly. In
// this case, the function computes in fp32, like DiffusionGemma's published code. With select
// "argmax", returns 1.
double temperature_of(const Policy& policy, int32_t step, int32_t steps);

}  // namespace dlm
