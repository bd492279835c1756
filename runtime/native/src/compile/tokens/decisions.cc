// Compiles decisions, which are lists of questions with fixed options. The code first builds a
// graph of bytes from the parts of the answer. Then, for each node of this graph, it finds the
// tokens that can follow the node, and the options that each of these tokens completes.
#include "compile/tokens/decisions.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/utf8.h"
#include "compile/automata/numbers.h"
#include "compile/tokens/lists.h"
#include "compile/tokens/token_states.h"

namespace dlm::compile {
namespace {

constexpr size_t kMostAnswerBytes = size_t{1} << 20, kMostOptions = 255;

// A graph of the bytes of all answers. Each node stores the bytes that can come next. The paths of
// all options of a question lead to the same next node.
struct Bytes {
  struct Step {
    uint8_t byte;
    int32_t to;
    int32_t completed;  // the option that ended before this byte, or kNone
  };
  std::vector<std::vector<Step>> steps;  // for each node: its steps
  // For each node: the option that an answer completes if it ends at this node, or kNone.
  std::vector<int32_t> ended;
  // The node at the end of every answer, if the last part is a fixed text. Otherwise kNone.
  int32_t last = kNone;
  bool is_open = false;              // true: any text may follow `last`
  std::vector<std::string> options;  // for each option: its text
  std::vector<int32_t> question_starts{0};

  int32_t add() {
    steps.emplace_back();
    ended.push_back(kNone);
    return static_cast<int32_t>(steps.size()) - 1;
  }
  const Step* find(int32_t node, uint8_t byte) const {
    for (const Step& step : steps[index(node)])
      if (step.byte == byte) return &step;
    return nullptr;
  }
  bool is_end(int32_t node) const { return node == last || ended[index(node)] >= 0; }
  bool is_free(int32_t node) const { return is_open && node == last; }
};

class Reader {
 public:
  // If `has_start` is true, kTextStart comes before each answer.
  Reader(const json::Value& root, bool has_start, Budget& budget)
      : root_(root), has_start_(has_start), budget_(budget) {}

  Bytes read() {
    root_.refuse_unknown({"parts", "is_open"});
    bytes_.is_open = root_.boolean("is_open");
    at_ = bytes_.add();
    if (has_start_) {
      const int32_t start = std::exchange(at_, bytes_.add());
      bytes_.steps[index(start)].push_back({static_cast<uint8_t>(kTextStart), at_, kNone});
    }
    for (const json::Value& part : root_.array("parts"))
      part.kind() == json::Value::Kind::string ? add_text(part) : add_question(part);
    if (bytes_.options.empty()) root_.at("parts").refuse("expected a list of options");
    if (open_.empty())
      bytes_.last = at_;
    else if (bytes_.is_open)
      root_.at("parts").refuse("expected text after the last question, because is_open is true");
    for (const auto& [node, option] : open_) bytes_.ended[index(node)] = option;
    return std::move(bytes_);
  }

 private:
  void add_text(const json::Value& part) {
    for (const char each : part.string()) {
      const auto byte = static_cast<uint8_t>(each);
      const int32_t to = bytes_.add();
      budget_.check_states(bytes_.steps.size());
      if (open_.empty()) bytes_.steps[index(at_)].push_back({byte, to, kNone});
      for (const auto& [node, option] : open_) {
        if (bytes_.find(node, byte) != nullptr)
          part.refuse("the text may also continue the option " +
                      json::quoted(bytes_.options[index(option)]) +
                      " to a longer option: start it with another character, such as a quote");
        bytes_.steps[index(node)].push_back({byte, to, option});
      }
      open_.clear();
      at_ = to;
    }
  }

  void add_question(const json::Value& part) {
    const std::vector<json::Value>& options = part.elements();
    if (!open_.empty()) part.refuse("expected text between two questions");
    if (options.empty() || options.size() > kMostOptions)
      part.refuse("expected 1 to 255 options, found " + std::to_string(options.size()));
    for (const json::Value& option : options) {
      int32_t node = at_;
      for (const char each : option.string()) {
        const auto byte = static_cast<uint8_t>(each);
        const Bytes::Step* const step = bytes_.find(node, byte);
        int32_t to = step == nullptr ? kNone : step->to;
        if (to < 0) {
          to = bytes_.add();
          budget_.check_states(bytes_.steps.size());
          bytes_.steps[index(node)].push_back({byte, to, kNone});
        }
        node = to;
      }
      if (std::any_of(open_.begin(), open_.end(),
                      [&](const auto& each) { return each.first == node; }))
        option.refuse("the question has the option " + json::quoted(option.string()) + " twice");
      open_.emplace_back(node, static_cast<int32_t>(bytes_.options.size()));
      bytes_.options.push_back(option.string());
    }
    bytes_.question_starts.push_back(static_cast<int32_t>(bytes_.options.size()));
  }

  const json::Value& root_;
  const bool has_start_;
  Budget& budget_;
  Bytes bytes_;
  // The current node: the end of the fixed text so far, or the start of the last question.
  int32_t at_ = 0;
  // For each option of the last question: the node where the option ends, and the option's number.
  std::vector<std::pair<int32_t, int32_t>> open_;
};

class Builder {
 public:
  Builder(Bytes bytes, const Vocabulary& vocabulary, Budget& budget)
      : bytes_(std::move(bytes)),
        vocabulary_(vocabulary),
        tree_(vocabulary.tree()),
        budget_(budget) {
    tags_.number_of({});
  }

  Automaton make() {
    end_node_ = static_cast<int32_t>(bytes_.steps.size());  // the node after the end token
    leaps_.resize(bytes_.steps.size() + 1);
    state_of(0, 0);
    for (size_t state = 0; state < states_.size(); ++state) add_edges(static_cast<int32_t>(state));
    drop_dead_states();
    Automaton out{};
    out.vocab_size = vocabulary_.vocab_size();
    out.states = static_cast<int32_t>(alive_.size());
    add_classes(out);
    add_tags(out);
    complete_tables(out);
    return out;
  }

 private:
  // A token, and the node that the answer reaches with this token. `tags` is the index of a list in
  // tags_. This list contains the options that the token completes.
  struct Leap {
    int32_t token, node, tags;
  };
  // A state of the automaton. It consists of a node, and the options that the last token has
  // completed.
  struct State {
    int32_t node, tags;
  };
  struct Edge {
    int32_t to;
    std::vector<int32_t> tokens;
  };

  int32_t state_of(int32_t node, int32_t tags) {
    const auto [found, is_new] =
        numbers_.try_emplace({node, tags}, static_cast<int32_t>(states_.size()));
    if (is_new) {
      states_.push_back({node, tags});
      budget_.check_states(states_.size());
    }
    return found->second;
  }

  // Returns the bytes that must follow a node. The result is cut to kEncodedBytes bytes and to
  // whole characters. Sets `size` to the number of these bytes before the cut.
  std::string forced_text(int32_t node, size_t& size) const {
    std::string out;
    for (size = 0; !bytes_.is_end(node) && bytes_.steps[index(node)].size() == 1; ++size) {
      const Bytes::Step& step = bytes_.steps[index(node)].front();
      if (out.size() < kEncodedBytes) out += static_cast<char>(step.byte);
      node = step.to;
    }
    drop_cut_char(out);
    return out;
  }

  void add_tokens(int32_t tree_node, int32_t node, int32_t tags, std::vector<Leap>& out) const {
    for (int32_t i = tree_.token_starts[index(tree_node)];
         i < tree_.token_starts[index(tree_node) + 1]; ++i)
      out.push_back({tree_.tokens[index(i)], node, tags});
  }

  // Finds the tokens that can come next, and appends them to `out`. `parent` is a node of the token
  // tree, so it represents the first bytes of some tokens. These bytes lead to `node`, and complete
  // the options of `tags`. The function visits only longer tokens that start with these bytes. If
  // `parent` is kNone, it visits all tokens. `wanted` is kNone or another node of the token tree.
  // If `wanted` is not kNone, the function omits all tokens of at most `forced` bytes, except the
  // tokens of `wanted`.
  void walk(int32_t parent, int32_t node, int32_t tags, int32_t wanted, size_t forced,
            std::vector<Leap>& out) {
    const int32_t end = parent < 0 ? tree_.size() : tree_.behind[index(parent)];
    for (int32_t child = parent + 1; child < end; child = tree_.behind[index(child)]) {
      budget_.check();
      int32_t to = node, completed = tags;
      if (bytes_.is_free(node)) {
        // kNamed and kTextStart are the two highest bytes.
        if (tree_.bytes[index(child)] >= static_cast<uint8_t>(kNamed)) continue;
      } else {
        const Bytes::Step* const step = bytes_.find(node, tree_.bytes[index(child)]);
        if (step == nullptr) continue;
        to = step->to;
        if (step->completed >= 0) {
          const auto [first, last] = tags_.list(tags);
          std::vector<int32_t> list(first, last);
          list.push_back(step->completed);
          completed = tags_.number_of(list);
        }
      }
      const bool is_other = wanted >= 0 && child != wanted &&
                            static_cast<size_t>(tree_.depths[index(child)]) <= forced;
      if (!is_other) add_tokens(child, to, completed, out);
      walk(child, to, completed, wanted, forced, out);
    }
  }

  const std::vector<Leap>& leaps_from(int32_t node) {
    std::vector<Leap>& leaps = leaps_[index(node)];
    if (!leaps.empty()) return leaps;
    int32_t ends_at = kNone, tags = 0;
    if (node == end_node_ || bytes_.is_free(node)) {
      ends_at = node;
    } else if (bytes_.is_end(node)) {
      ends_at = end_node_;
      if (const int32_t option = bytes_.ended[index(node)]; option >= 0)
        tags = tags_.number_of({option});
    }
    if (node != end_node_) {
      size_t forced = 0;
      const std::string text = forced_text(node, forced);
      walk(kNone, node, 0, vocabulary_.first_node(text), forced, leaps);
    }
    if (ends_at >= 0)
      for (const int32_t end : vocabulary_.ends()) leaps.push_back({end, ends_at, tags});
    return leaps;
  }

  void add_edges(int32_t state) {
    std::map<int32_t, std::vector<int32_t>> found;
    for (const Leap& leap : leaps_from(states_[index(state)].node))
      found[state_of(leap.node, leap.tags)].push_back(leap.token);
    edges_.emplace_back();
    for (auto& [to, tokens] : found) {
      edges_.back().push_back({to, std::move(tokens)});
      token_count_ += edges_.back().back().tokens.size();
    }
    edge_count_ += edges_.back().size();
    budget_.check_edges(edge_count_);
    budget_.check_memory(token_count_ * sizeof(int32_t) + edge_count_ * sizeof(Edge));
  }

  // Computes the smallest number of tokens from each state to an end. Removes the states from which
  // no end can be reached.
  void drop_dead_states() {
    std::vector<std::vector<int32_t>> sources(states_.size());
    for (size_t state = 0; state < states_.size(); ++state)
      for (const Edge& edge : edges_[state])
        sources[index(edge.to)].push_back(static_cast<int32_t>(state));
    distances_.assign(states_.size(), kNone);
    std::vector<int32_t> order;
    for (size_t state = 0; state < states_.size(); ++state)
      if (const int32_t node = states_[state].node; node == end_node_ || bytes_.is_free(node)) {
        distances_[state] = 0;
        order.push_back(static_cast<int32_t>(state));
      }
    for (size_t i = 0; i < order.size(); ++i)
      for (const int32_t from : sources[index(order[i])])
        if (distances_[index(from)] < 0) {
          distances_[index(from)] = distances_[index(order[i])] + 1;
          order.push_back(from);
        }
    renamed_.assign(states_.size(), kNone);
    std::vector<uint8_t> is_made(bytes_.options.size());
    for (size_t state = 0; state < states_.size(); ++state) {
      if (distances_[state] < 0) continue;
      renamed_[state] = static_cast<int32_t>(alive_.size());
      alive_.push_back(static_cast<int32_t>(state));
      const auto [first, last] = tags_.list(states_[state].tags);
      for (const int32_t* option = first; option != last; ++option) is_made[index(*option)] = 1;
    }
    for (size_t option = 0; option < is_made.size(); ++option)
      if (is_made[option] == 0)
        fail(DLM_INVALID_ARGUMENT, "decisions: no tokens of this vocabulary make the option %s",
             json::quoted(bytes_.options[option]).c_str());
  }

  // Tokens with the same edges form a class. The value kNone in the lists of the end tokens makes
  // them a separate class. If this class is the only possible class at a position, a request may
  // fill the position with any end token.
  void add_classes(Automaton& out) {
    std::vector<std::vector<int32_t>> edges_of(index(out.vocab_size));  // for each token: its edges
    for (const int32_t end : vocabulary_.ends()) edges_of[index(end)].push_back(kNone);
    int32_t number = 0;
    for (const int32_t state : alive_)
      for (const Edge& edge : edges_[index(state)]) {
        if (renamed_[index(edge.to)] < 0) continue;
        for (const int32_t token : edge.tokens) edges_of[index(token)].push_back(number);
        ++number;
      }
    Lists classes;
    for (const std::vector<int32_t>& edges : edges_of)
      out.token_class.push_back(edges.empty() ? kNone : classes.number_of(edges));
    out.classes = classes.size();
    std::vector<std::vector<int32_t>> classes_of(index(number));  // for each edge: its classes
    for (int32_t each = 0; each < out.classes; ++each) {
      const auto [first, last] = classes.list(each);
      for (const int32_t* edge = first; edge != last; ++edge)
        if (*edge >= 0) classes_of[index(*edge)].push_back(each);
    }
    Lists groups;
    out.edge_starts.push_back(0);
    for (size_t state = 0, edge = 0; state < alive_.size(); ++state) {
      for (const Edge& each : edges_[index(alive_[state])]) {
        if (renamed_[index(each.to)] < 0) continue;
        out.edge_states.push_back(renamed_[index(each.to)]);
        out.edge_groups.push_back(groups.number_of(classes_of[edge++]));
      }
      out.edge_starts.push_back(static_cast<int32_t>(out.edge_states.size()));
      out.distances.push_back(distances_[index(alive_[state])]);
    }
    out.groups = groups.size();
    out.group_starts.push_back(0);
    for (int32_t group = 0; group < out.groups; ++group) {
      const auto [first, last] = groups.list(group);
      out.group_classes.insert(out.group_classes.end(), first, last);
      out.group_starts.push_back(static_cast<int32_t>(out.group_classes.size()));
    }
  }

  void add_tags(Automaton& out) const {
    out.question_starts = bytes_.question_starts;
    out.tag_starts.push_back(0);
    for (const int32_t state : alive_) {
      const auto [first, last] = tags_.list(states_[index(state)].tags);
      out.tags.insert(out.tags.end(), first, last);
      out.tag_starts.push_back(static_cast<int32_t>(out.tags.size()));
    }
  }

  const Bytes bytes_;
  const Vocabulary& vocabulary_;
  const TokenTree& tree_;
  Budget& budget_;
  int32_t end_node_ = kNone;
  Lists tags_;
  // For each node: the tokens that can follow it. The list is empty if it is not computed yet.
  std::vector<std::vector<Leap>> leaps_;
  // Maps a node and tags to the number of the state.
  std::map<std::pair<int32_t, int32_t>, int32_t> numbers_;
  std::vector<State> states_;
  std::vector<std::vector<Edge>> edges_;  // for each state: its edges
  size_t edge_count_ = 0, token_count_ = 0;
  std::vector<int32_t> distances_, renamed_, alive_;
};

}  // namespace

Automaton decisions(std::string_view content, const Vocabulary& vocabulary, Budget& budget) {
  constexpr int kDepth = 4;
  if (vocabulary.ends().empty())
    fail(DLM_UNSUPPORTED,
         "decisions need an end token after the answer, but this bundle has no end token: use a "
         "constraint, such as a list of texts");
  std::unique_ptr<const json::Value> root;
  Bytes bytes;
  try {
    root = json::parse(content, kMostAnswerBytes, kDepth);
    bytes = Reader(*root, vocabulary.has_starts(), budget).read();
  } catch (const TooLarge&) {
    throw;
  } catch (const Error& err) {
    fail(DLM_INVALID_ARGUMENT, "decisions: %s", err.what());
  }
  return Builder(std::move(bytes), vocabulary, budget).make();
}

}  // namespace dlm::compile
