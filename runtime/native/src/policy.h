// What to commit after a pass: the policy in checked form, and its rules as pure functions.
//
// Definitions: LLaDA (arXiv:2502.09992), Fast-dLLM (arXiv:2505.22618), Dream (arXiv:2508.15487), SDAR (arXiv:2510.06303),
// entropy-bounded sampling (arXiv:2505.24857). exporter/dlm_export/reference.py states the same rules in plain torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dlm_runtime.h"

namespace dlm {

enum class Score { confidence, margin, entropy, random };
enum class Commit { statically, threshold, dynamic, factor, entropy_bound, timestep, sequential };
enum class Cache { none, prefix, dual };

struct Policy {
  Score score;
  Commit commit;
  bool compare_strictly;  // > rather than >=
  Cache cache;
  bool stop_at_eos;
  int32_t block_length;     // 0: the whole generation
  int32_t steps_per_block;  // 0: one a token
  int32_t refresh;          // 0: every block starts with a full pass
  double threshold, factor, entropy_bound, timestep_eps;
  uint64_t seed;

  bool needs_entropy() const { return score == Score::entropy || commit == Commit::entropy_bound; }
};

// Checks every field and combination; throws Error(DLM_INVALID_ARGUMENT or DLM_UNSUPPORTED) that lists the choices.
Policy check_policy(const dlm_policy& policy);

// The canonical static string of a field's value, or nullptr where the value is none of the field's choices.
const char* canonical_choice(const std::string& field, const std::string& value);

// Planned commits of `step` when `masked` positions are split over `steps` as evenly as integers allow, larger first.
int32_t even_count(int32_t masked, int32_t step, int32_t steps);

// Dream's share of the positions that are masked now, in fp32 as published; all of them at the last step, never none.
int32_t timestep_count(int32_t masked, int32_t step, int32_t steps, double eps);

// Orders indices into scores by what commits first (score descending, position ascending; by position alone for
// sequential) and returns how many of them to commit: at least 1 unless there is none. scores are in order of position.
int32_t choose(const Policy& policy, const std::vector<double>& scores, int32_t planned, std::vector<int32_t>& order);

}  // namespace dlm
