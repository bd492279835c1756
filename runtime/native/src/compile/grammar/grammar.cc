#include "compile/grammar/grammar.h"

#include <algorithm>
#include <map>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "compile/automata/depths.h"
#include "compile/grammar/grammar_text.h"

namespace dlm::compile {
namespace {

// For each rule: the rules to which the rule refers.
using RuleGraph = std::vector<std::vector<uint32_t>>;

// Finds the strongly connected components of a graph with Tarjan's algorithm. numbers[v] is the
// number of the component that contains vertex v. If an edge leads from one component to another,
// the component to which the edge leads has the lower number.
struct Components {
  std::vector<uint32_t> numbers;
  uint32_t count = 0;

  explicit Components(const RuleGraph& graph)
      : numbers(graph.size(), 0), graph_(graph), order_(graph.size(), 0), low_(graph.size(), 0) {
    for (uint32_t at = 0; at < graph.size(); ++at)
      if (order_[at] == 0) visit(at);
  }

 private:
  // The recursion is at most as deep as the number of rules, and a grammar has few rules.
  void visit(uint32_t at) {
    order_[at] = low_[at] = ++visited_;
    open_.push_back(at);
    for (const uint32_t to : graph_[at]) {
      if (order_[to] == 0) visit(to);
      low_[at] = std::min(low_[at], low_[to]);
    }
    if (low_[at] != order_[at]) return;
    for (uint32_t last = UINT32_MAX; last != at;) {
      last = open_.back();
      open_.pop_back();
      numbers[last] = count;
      // Marks the vertex as finished, so that the search does not add it to a second component.
      low_[last] = UINT32_MAX;
    }
    ++count;
  }

  const RuleGraph& graph_;
  std::vector<uint32_t> order_, low_, open_;
  uint32_t visited_ = 0;
};

// Compiles the rules of a grammar to regular languages (sets of texts).
//
// In a grammar such as `root ::= "a" root | "b"`, a rule refers to itself at its end. Rules can
// also refer to each other at their ends. Rules that refer to each other in this way, directly or
// through other rules, form a rule set. The rules of a rule set form a system of linear equations.
// The solutions of this system are regular languages.
//
// A reference is a call if it is not at the end of a rule, or if it refers to a rule of another
// rule set. A recursive call is a call that leads back to the calling rule set. The compiler
// computes the texts of all rules level by level. A recursive call matches the texts that the rule
// has at the next deeper level. At the deepest level, recursive calls match no text.
class Compiler {
 public:
  Compiler(Expressions& expressions, std::string_view text)
      : expressions_(expressions), text_(text), grammar_(read_grammar(expressions, text)) {
    refuse_left_recursion();
    RuleGraph tails(grammar_.rules.size());
    for (uint32_t rule = 0; rule < tails.size(); ++rule)
      tails_of(grammar_.rules[rule].choices, tails[rule]);
    const Components found(tails);
    sets_ = found.numbers;
    members_.resize(found.count);
    for (uint32_t rule = 0; rule < tails.size(); ++rule) members_[sets_[rule]].push_back(rule);
    states_.assign(found.count, State::unknown);
    order_calls(sets_[grammar_.root]);
  }

  bool is_recursive() const { return !deeper_.empty(); }

  Node texts(uint32_t max_depth) {
    std::vector<Node> below(grammar_.rules.size(), expressions_.nothing());
    for (uint32_t level = is_recursive() ? max_depth + 1 : 1; level-- > 0;) {
      std::vector<Node> made(grammar_.rules.size(), expressions_.nothing());
      for (const uint32_t set : order_) solve(set, made, below);
      if (made == below) break;  // further levels would add no texts
      below = std::move(made);
    }
    return below[grammar_.root];
  }

 private:
  enum class State : uint8_t { unknown, open, done };

  // The right side of a linear equation, which describes the texts of a rule or of a part of a
  // rule. Some of these texts end with a reference to a rule of the same rule set. `whole` contains
  // all other texts. For each rule of the rule set, `before` contains the texts before a reference
  // to this rule.
  struct Linear {
    Node whole;
    std::map<uint32_t, Node> before;
  };

  static bool is_once(const GrammarPart& part) { return part.high == 1; }

  // ---- References between rules ----

  void tails_of(const GrammarChoices& choices, std::vector<uint32_t>& out) {
    for (const GrammarSequence& each : choices) {
      expressions_.budget().check();
      if (each.empty() || !is_once(each.back())) continue;
      if (each.back().kind == GrammarPart::rule) out.push_back(each.back().number);
      tails_of(each.back().choices, out);
    }
  }

  bool is_nullable(const GrammarPart& part, const std::vector<uint8_t>& nullable) {
    if (part.low == 0) return true;
    if (part.kind == GrammarPart::node) return expressions_.is_nullable(part.texts);
    if (part.kind == GrammarPart::rule) return nullable[part.number] != 0;
    return is_nullable(part.choices, nullable);
  }
  bool is_nullable(const GrammarChoices& choices, const std::vector<uint8_t>& nullable) {
    return std::any_of(choices.begin(), choices.end(), [&](const GrammarSequence& each) {
      return std::all_of(each.begin(), each.end(), [&](const GrammarPart& part) {
        expressions_.budget().check();
        return is_nullable(part, nullable);
      });
    });
  }

  // Appends to `out` each reference to a rule that can be at the start of a text of `choices`.
  void starts_of(const GrammarChoices& choices, const std::vector<uint8_t>& nullable,
                 std::vector<const GrammarPart*>& out) {
    for (const GrammarSequence& each : choices)
      for (const GrammarPart& part : each) {
        expressions_.budget().check();
        if (part.kind == GrammarPart::rule) out.push_back(&part);
        starts_of(part.choices, nullable, out);
        if (!is_nullable(part, nullable)) break;
      }
  }

  void refuse_left_recursion() {
    const size_t count = grammar_.rules.size();
    std::vector<uint8_t> nullable(count, 0);
    for (bool is_new = true; is_new;) {
      is_new = false;
      for (size_t rule = 0; rule < count; ++rule)
        if (nullable[rule] == 0 && is_nullable(grammar_.rules[rule].choices, nullable))
          nullable[rule] = 1, is_new = true;
    }
    std::vector<std::vector<const GrammarPart*>> starts(count);
    RuleGraph graph(count);
    for (size_t rule = 0; rule < count; ++rule) {
      starts_of(grammar_.rules[rule].choices, nullable, starts[rule]);
      for (const GrammarPart* const part : starts[rule]) graph[rule].push_back(part->number);
    }
    const Components found(graph);
    for (size_t rule = 0; rule < count; ++rule)
      for (const GrammarPart* const part : starts[rule])
        if (found.numbers[part->number] == found.numbers[rule])
          refuse_grammar(
              text_, part->at,
              "left recursion: rule '" + grammar_.rules[rule].name +
                  "' starts with itself. Write a repetition, such as item (\",\" item)*");
  }

  // Adds a rule set to order_, after all rule sets that it calls. Adds recursive calls to deeper_.
  void order_calls(uint32_t set) {
    states_[set] = State::open;
    std::vector<Call> calls;
    for (const uint32_t rule : members_[set]) calls_of(grammar_.rules[rule].choices, true, calls);
    for (const auto& [part, is_tail] : calls) {
      const uint32_t to = sets_[part->number];
      if (is_tail && to == set) continue;
      if (states_[to] == State::unknown) order_calls(to);
      if (states_[to] == State::open) deeper_.insert(part);
    }
    states_[set] = State::done;
    order_.push_back(set);
  }

  // A reference to a rule. The bool is true if the reference is at the end of the rule that
  // contains it.
  using Call = std::pair<const GrammarPart*, bool>;

  void calls_of(const GrammarChoices& choices, bool is_tail, std::vector<Call>& out) {
    for (const GrammarSequence& each : choices)
      for (const GrammarPart& part : each) {
        expressions_.budget().check();
        const bool is_last = is_tail && &part == &each.back() && is_once(part);
        if (part.kind == GrammarPart::rule) out.emplace_back(&part, is_last);
        calls_of(part.choices, is_last, out);
      }
  }

  // ---- Texts ----

  // Computes the texts of each rule of a rule set, and stores them in `made`. `made` must already
  // contain the texts of all rule sets that this rule set calls. `below` contains the texts that
  // recursive calls match.
  void solve(uint32_t set, std::vector<Node>& made, const std::vector<Node>& below) {
    std::map<uint32_t, Linear> equations;
    for (const uint32_t rule : members_[set])
      equations.emplace(rule, choices(grammar_.rules[rule].choices, set, true, made, below));
    // The solution of the equation x = a x + b is x = a* b (Arden's rule). The loop solves the
    // equation of each rule, and inserts the solution into all other equations.
    for (const uint32_t rule : members_[set]) {
      Linear solved = equations.at(rule);
      if (const auto own = solved.before.find(rule); own != solved.before.end()) {
        const Node loop = expressions_.repeat(own->second, 0, kUnbounded);
        solved.before.erase(own);
        solved = after(loop, solved);
      }
      equations.at(rule) = solved;
      for (auto& [other, equation] : equations) {
        const auto found = equation.before.find(rule);
        if (other == rule || found == equation.before.end()) continue;
        const Node factor = found->second;
        equation.before.erase(found);
        equation = either(equation, after(factor, solved));
      }
    }
    for (const auto& [rule, equation] : equations) made[rule] = equation.whole;
  }

  Linear after(Node first, const Linear& rest) {
    expressions_.budget().check();
    Linear made{expressions_.sequence(first, rest.whole), {}};
    for (const auto& [rule, node] : rest.before)
      made.before.emplace(rule, expressions_.sequence(first, node));
    return made;
  }

  Linear either(const Linear& one, const Linear& other) {
    Linear made{expressions_.either(one.whole, other.whole), one.before};
    for (const auto& [rule, node] : other.before) {
      const auto [found, is_new] = made.before.emplace(rule, node);
      if (!is_new) found->second = expressions_.either(found->second, node);
    }
    return made;
  }

  Linear choices(const GrammarChoices& some, uint32_t set, bool is_tail,
                 const std::vector<Node>& made, const std::vector<Node>& below) {
    Linear all{expressions_.nothing(), {}};
    for (const GrammarSequence& each : some) {
      Linear sequence{expressions_.empty(), {}};
      for (size_t i = each.size(); i-- > 0;) {
        const bool is_last = is_tail && i + 1 == each.size() && is_once(each[i]);
        const Linear found = part(each[i], set, is_last, made, below);
        sequence = i + 1 == each.size() ? found : after(found.whole, sequence);
      }
      all = either(all, sequence);
    }
    return all;
  }

  Linear part(const GrammarPart& some, uint32_t set, bool is_tail, const std::vector<Node>& made,
              const std::vector<Node>& below) {
    Linear found{some.texts, {}};
    if (some.kind == GrammarPart::group) {
      found = choices(some.choices, set, is_tail, made, below);
    } else if (some.kind == GrammarPart::rule) {
      if (is_tail && sets_[some.number] == set)
        found = {expressions_.nothing(), {{some.number, expressions_.empty()}}};
      else
        found.whole = (deeper_.count(&some) != 0 ? below : made)[some.number];
    }
    if (is_once(some) && some.low == 0)
      found.whole = expressions_.optional(found.whole);
    else if (!is_once(some))
      found.whole = expressions_.repeat(found.whole, some.low, some.high);
    return found;
  }

  Expressions& expressions_;
  const std::string_view text_;
  const GrammarText grammar_;
  std::vector<uint32_t> sets_;  // for each rule: the index of the rule set that contains the rule
  RuleGraph members_;           // for each rule set: its rules
  std::vector<State> states_;   // for each rule set: the progress of order_calls()
  // The rule sets that can be reached from root. Each rule set comes after the rule sets that it
  // calls.
  std::vector<uint32_t> order_;
  std::unordered_set<const GrammarPart*> deeper_;  // the recursive calls
};

// Estimates the number of states of a node's automaton. If a part occurs several times, counts it
// each time.
double unfolded_states(const Expressions& expressions, Node root) {
  // The parts of a node have lower indices than the node itself. So the loop computes the sizes of
  // the parts first.
  std::vector<double> sizes(root + 1, 1);
  for (Node node = 0; node <= root; ++node) {
    double& size = sizes[node];
    switch (expressions.kind(node)) {
      case Expressions::Kind::bytes:
        size = static_cast<double>(expressions.text(node).size());
        break;
      case Expressions::Kind::sequence:
        size = sizes[expressions.first(node)] + sizes[expressions.second(node)];
        break;
      case Expressions::Kind::either:
        for (const Node each : expressions.choices(node)) size += sizes[each];
        break;
      case Expressions::Kind::repeat: {
        const uint32_t high = expressions.high(node);
        const uint32_t times = high == kUnbounded ? std::max(expressions.low(node), 1u) : high;
        size = times * sizes[expressions.first(node)];
        break;
      }
      default:
        break;
    }
  }
  return sizes[root];
}

}  // namespace

Node grammar(Expressions& expressions, std::string_view text, std::optional<uint32_t> max_depth) {
  check_max_depth(max_depth);
  Compiler compiler(expressions, text);
  uint32_t depth = max_depth.value_or(kUsualDepth);
  Node made = compiler.texts(depth);
  const auto most = static_cast<double>(expressions.budget().limits().states);
  while (!max_depth.has_value() && compiler.is_recursive() && depth > 0 &&
         unfolded_states(expressions, made) > most)
    made = compiler.texts(--depth);
  if (made == expressions.nothing())
    throw Error(DLM_INVALID_ARGUMENT,
                "grammar: rule 'root' has no text" +
                    (compiler.is_recursive() ? " within max_depth " + std::to_string(depth)
                                             : std::string()));
  return made;
}

}  // namespace dlm::compile
