// The rules that choose which positions commit after a pass.
//
// The rules come from LLaDA (arXiv:2502.09992), Fast-dLLM (arXiv:2505.22618), Dream
// (arXiv:2508.15487), SDAR (arXiv:2510.06303), entropy-bounded sampling (arXiv:2505.24857), d3LLM
// (arXiv:2601.07568), D2F (arXiv:2508.09192), SDLM (arXiv:2509.24007) and the released code of
// DiffusionGemma. exporter/dlm_export/network/commit_rules.py implements the same rules in Python.
//
// The rules use only the scores of positions. A proposer computes the scores. So the same rules
// work with every proposer: argmax, sampling and constraints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dlm {

struct Policy;

// The names are in the order of the enum, and NULL ends the array. The first rule is the default.
enum class Commit {
  statically,
  threshold,
  dynamic,
  factor,
  entropy_bound,
  timestep,
  sequential,
  verify,
  entropy_threshold,
  longest_prefix
};
inline constexpr const char* kCommitNames[] = {
    "static",     "threshold", "dynamic",           "factor",         "entropy_bound", "timestep",
    "sequential", "verify",    "entropy_threshold", "longest_prefix", nullptr};

// Returns true if a rule compares scores with fractions, so that scores must be in 0..1.
constexpr bool compares_fractions(Commit rule) {
  return rule == Commit::threshold || rule == Commit::dynamic || rule == Commit::factor ||
         rule == Commit::longest_prefix;
}
// Returns true if a rule compares entropies, so that the scores must be entropies.
constexpr bool compares_entropies(Commit rule) {
  return rule == Commit::entropy_bound || rule == Commit::entropy_threshold;
}

// Splits `masked` positions evenly over `steps` steps. Returns the number of positions to commit at
// step `step`. If the shares cannot be equal, earlier steps get the larger shares.
int32_t even_count(int32_t masked, int32_t step, int32_t steps);

// Returns the number of positions that the schedule "floor" (RND1) commits in the next pass. The
// block started with `masked` undecided positions, and still has `left` of them. The schedule
// counts the passes of the block down from `steps`. After the pass with number k, floor(masked * k
// / steps) positions should stay masked. In the published code, some passes commit no position.
// This function skips these passes. It computes in fp32, like the published code.
int32_t floor_count(int32_t masked, int32_t left, int32_t steps);

// Returns the number of positions that Dream's schedule commits at a step. This number is at least
// 1. The function computes in fp32, like Dream's published code. The last step commits all
// remaining positions.
int32_t timestep_count(int32_t masked, int32_t step, int32_t steps, double eps);

// Converts a confidence, a margin or a random number to a score, and back. A fp64 number cannot
// tell 1 - 1e-17 from 1. So the loop keeps a fraction c as the score atanh(c), computed from the
// odds c / (1 - c), and compares it with the score of the threshold. The odds of a confidence come
// from the sum of the other tokens' exponentials, without a subtraction from 1. Fractions outside
// -1..1 count as -1 or 1. Entropies are scores already.
double log_odds_of(double fraction);
double score_of_log_odds(double log_odds);
double score_of(double fraction);
double fraction_of(double score);

// Chooses the rows that commit. `scores` contains one score per row, in the order of the positions.
// Fills `order` with the indices of all rows, sorted by descending score. Rows with equal scores
// stay in the order of their positions. If the policy commits from left to right (`sequential`,
// `longest_prefix`), all rows stay in the order of their positions. Returns the number of rows that
// commit, at least 1. These are the first rows in `order`.
int32_t choose(const Policy& policy, const std::vector<double>& scores, int32_t planned,
               std::vector<int32_t>& order);

// The rows [first, last) of a block that passes decide together with other blocks. If `is_forced`
// is true, at least one of them commits.
struct StartedBlock {
  int32_t first, last;
  bool is_forced;
};

// Chooses the rows that commit if passes decide positions of several blocks (next_block). Fills
// `chosen` with the chosen rows. No block in `blocks` is empty.
void choose_ahead(const Policy& policy, const std::vector<double>& scores,
                  const std::vector<StartedBlock>& blocks, std::vector<int32_t>& chosen);

}  // namespace dlm
