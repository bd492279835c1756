#include "policy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "error.h"

namespace dlm {
namespace {

struct Field {
  const char* name;
  std::vector<const char*> choices;
};

// In the order of the enums. What is not listed yet (sampling, remasking, the block cache) is refused by name.
const std::vector<Field>& fields() {
  static const std::vector<Field> all = {
      {"select", {"argmax"}},
      {"score", {"confidence", "margin", "entropy", "random"}},
      {"commit", {"static", "threshold", "dynamic", "factor", "entropy_bound", "timestep", "sequential"}},
      {"compare", {">=", ">"}},
      {"schedule", {"even"}},
      {"remask", {"none"}},
      {"cache", {"none", "prefix", "dual"}},
      {"stop", {"none", "eos"}},
  };
  return all;
}

const Field& field(const std::string& name) {
  for (const Field& f : fields())
    if (name == f.name) return f;
  fail(DLM_INTERNAL, "no policy field %s", name.c_str());
}

int choice(const char* name, const char* value) {
  const Field& f = field(name);
  std::string known;
  for (size_t i = 0; i < f.choices.size(); ++i) {
    if (value != nullptr && std::strcmp(value, f.choices[i]) == 0) return static_cast<int>(i);
    known += std::string(i == 0 ? "" : ", ") + f.choices[i];
  }
  fail(DLM_INVALID_ARGUMENT, "policy: %s = \"%.40s\" is not one of: %s", name, value == nullptr ? "" : value, known.c_str());
}

double number(const char* name, double value, double low, double high) {
  if (!(value >= low && value <= high))
    fail(DLM_INVALID_ARGUMENT, "policy: %s = %.10g is outside %.10g..%.10g", name, value, low, high);
  return value;
}

}  // namespace

const char* canonical_choice(const std::string& name, const std::string& value) {
  for (const char* known : field(name).choices)
    if (value == known) return known;
  return nullptr;
}

Policy check_policy(const dlm_policy& p) {
  if (p.struct_size != sizeof(dlm_policy))
    fail(DLM_INVALID_ARGUMENT, "policy: struct_size is %zu, expected %zu: start from dlm_policy_init", p.struct_size,
         sizeof(dlm_policy));
  choice("select", p.select);
  choice("schedule", p.schedule);
  choice("remask", p.remask);
  Policy out{};
  out.score = static_cast<Score>(choice("score", p.score));
  out.commit = static_cast<Commit>(choice("commit", p.commit));
  out.compare_strictly = choice("compare", p.compare) == 1;
  out.cache = static_cast<Cache>(choice("cache", p.cache));
  out.stop_at_eos = choice("stop", p.stop) == 1;
  out.block_length = static_cast<int32_t>(number("block_length", p.block_length, 0, 1 << 24));
  out.steps_per_block = static_cast<int32_t>(number("steps_per_block", p.steps_per_block, 0, 1 << 24));
  out.refresh = static_cast<int32_t>(number("refresh", p.refresh, 0, 1 << 24));
  out.threshold = number("threshold", p.threshold, 0, 1);
  out.factor = number("factor", p.factor, 0, 1e9);
  out.entropy_bound = number("entropy_bound", p.entropy_bound, 0, 1e9);
  out.timestep_eps = number("timestep_eps", p.timestep_eps, 1e-9, 1);
  out.seed = p.seed;
  if (p.temperature != 0)
    fail(DLM_UNSUPPORTED, "policy: temperature = %g, but this version decodes at temperature 0 only (argmax)", p.temperature);
  if (out.refresh > 0 && out.cache == Cache::none)
    fail(DLM_INVALID_ARGUMENT,
         "policy: refresh = %d, but cache = \"none\" keeps no rows to refresh: use cache = \"prefix\" or \"dual\", or refresh = 0",
         out.refresh);
  const bool wants_fraction =
      out.commit == Commit::threshold || out.commit == Commit::dynamic || out.commit == Commit::factor;
  if (wants_fraction && out.score == Score::entropy)
    fail(DLM_INVALID_ARGUMENT, "policy: commit = \"%s\" compares scores in 0..1, entropies are not: use score = \"confidence\"",
         p.commit);
  if (out.commit == Commit::entropy_bound) out.score = Score::entropy;  // the rule ranks by entropy
  return out;
}

int32_t even_count(int32_t masked, int32_t step, int32_t steps) {
  return step < steps ? masked / steps + (step < masked % steps ? 1 : 0) : 1;
}

int32_t timestep_count(int32_t masked, int32_t step, int32_t steps, double eps) {
  if (step >= steps - 1) return masked;
  // torch.linspace(1, eps, steps + 1) in fp32: from either end by the rounded increment, one rounding a value.
  const int32_t count = steps + 1;
  const float end = static_cast<float>(eps), increment = (end - 1.0f) / static_cast<float>(count - 1);
  const auto t = [&](int32_t i) {
    const double exact = i < count / 2 ? 1.0 + static_cast<double>(increment) * i
                                       : static_cast<double>(end) - static_cast<double>(increment) * (count - 1 - i);
    return static_cast<float>(exact);
  };
  const float share = 1.0f - t(step + 1) / t(step);
  return std::max(1, static_cast<int32_t>(static_cast<float>(masked) * share));
}

int32_t choose(const Policy& policy, const std::vector<double>& scores, int32_t planned, std::vector<int32_t>& order) {
  const auto size = static_cast<int32_t>(scores.size());
  order.resize(scores.size());
  std::iota(order.begin(), order.end(), 0);
  if (policy.commit != Commit::sequential)
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
  const auto ranked = [&](int32_t rank) { return scores[static_cast<size_t>(order[static_cast<size_t>(rank)])]; };
  planned = std::max(1, std::min(planned, size));
  const auto above = [&] {
    int32_t count = 0;
    while (count < size &&
           (policy.compare_strictly ? ranked(count) > policy.threshold : ranked(count) >= policy.threshold))
      ++count;
    return count;
  };
  int32_t taken = 1;
  switch (policy.commit) {
    case Commit::statically:
    case Commit::timestep:
    case Commit::sequential:
      taken = planned;
      break;
    case Commit::threshold:
      taken = std::max(1, above());
      break;
    case Commit::dynamic:
      taken = std::max(planned, above());
      break;
    case Commit::factor:
      while (taken < size && ranked(taken) >= 1 - policy.factor / (taken + 2)) ++taken;
      break;
    case Commit::entropy_bound:
      for (double before = -ranked(0); taken < size && before <= policy.entropy_bound; ++taken) before -= ranked(taken);
      break;
  }
  return std::min(taken, size);
}

}  // namespace dlm
