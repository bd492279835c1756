// Compiles regular expressions that have conditions on neighbouring characters. Such conditions are
// anchors (^ and $), word boundaries (\b), look-ahead and look-behind.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "compile/automata/expression.h"

namespace dlm::compile {

// A condition on the character before a position and the character after it. For example, ^
// requires that there is no character before the position. `before` contains two sets for the
// character before the position. `after` contains two sets for the character after the position.
// The two sets divide the characters into four kinds:
//
//   0: no character, because the position is at the start or the end of the text
//   1: a character of the first set
//   2: a character of the second set
//   3: any other character
//
// For each kind of the character before and each kind of the character after, `holds` says whether
// the condition is true.
struct Look {
  std::array<CodePoints, 2> before, after;
  // The indices are [kind of the character before][kind of the character after].
  std::array<std::array<bool, 4>, 4> holds{};
};

// Compiles one regular expression. The parser of the expression builds pieces with look(), ahead(),
// sequence(), either() and repeat(). Then node() converts the piece for the whole expression to a
// node, which stands for a language (a set of texts). Parts without conditions are plain nodes, and
// need no further work.
class Looks {
 public:
  // A function that returns a node for the characters of a set. The function determines how the
  // node writes a character, for example in UTF-8, or in UTF-8 with the escapes of JSON strings.
  using Spell = Node (*)(Expressions&, const CodePoints&);

  // Each error message starts with `subject`, for example "regex".
  Looks(Expressions& expressions, Spell spell, std::string subject);

  // A part of an expression. If the part has no conditions, `node` is the node of the part, and
  // `item` is 0. Otherwise `item` is the index of the part in items_.
  struct Piece {
    Node node = 0;
    uint32_t item = 0;
  };
  Piece plain(Node node) const { return {node, 0}; }
  Piece look(Look look);
  // Returns a look-ahead, which is a condition on the text after a position. The condition is true
  // if this text starts with a match of `piece`. If `is_negative` is true, the condition is true if
  // the text does not start with a match.
  Piece ahead(Piece piece, bool is_negative);
  Piece sequence(std::vector<Piece> parts);
  Piece either(std::vector<Piece> choices);
  Piece repeat(Piece part, uint32_t low, uint32_t high);

  // Returns all texts that `piece` matches as a whole. Call this function once, after all pieces
  // are built.
  Node node(Piece piece);

 private:
  enum class Kind : uint8_t { look, ahead, sequence, either, repeat };
  struct Item {
    Kind kind = Kind::look;
    bool looks_before = false, looks_after = false, looks_far = false, is_negative = false;
    uint32_t low = 0, high = 0;
    std::vector<Piece> parts = {};
    Look look = {};
    std::vector<Node> steps = {};  // close() fills this list
  };
  // The texts that may follow a position. These texts depend on the character before the position,
  // so there is one node for each class that this character can have. Node 0 is for the start of
  // the text, where there is no such character. Node i + 1 is for the class before_[i].
  using Rest = std::vector<Node>;
  // The key of a cached result. The key consists of these elements:
  //
  //   - the index of the item
  //   - the index of the item's part, or the smallest number of repetitions of the part
  //   - the largest number of repetitions of the part
  //   - the classes of the characters before and after the part; class 0 means that there is no
  //     character
  using Key = std::tuple<uint32_t, size_t, uint32_t, size_t, size_t>;

  Piece add(Item item);
  bool looks_before(Piece piece) const { return items_[piece.item].looks_before; }
  bool looks_after(Piece piece) const { return items_[piece.item].looks_after; }
  void divide(const std::array<CodePoints, 2>& sets, std::vector<CodePoints>& classes) const;
  static size_t kind_of(const std::array<CodePoints, 2>& sets,
                        const std::vector<CodePoints>& classes, size_t place);
  bool holds(const Look& look, size_t before, size_t after) const;

  enum class Side : uint8_t { start, end };
  // not_empty() returns the texts of `node` except the empty text. edged() returns the texts of
  // `node` whose first or last character is in the selected classes. With Side::start, the function
  // tests the first character, and `classes` selects from after_. With Side::end, it tests the last
  // character, and `classes` selects from before_. Bit i of `classes` selects the class with the
  // index i.
  Node not_empty(Node node, int depth = 0);
  Node edged(Node node, Side side, uint64_t classes);
  Node edged(Node node, Side side, const CodePoints& points, int depth);
  Node starting(Node node, size_t after) {
    return edged(node, Side::start, uint64_t{1} << (after - 1));
  }
  Node ending(Node node, size_t before) {
    return edged(node, Side::end, uint64_t{1} << (before - 1));
  }

  Rest rest_from(Piece piece, const Rest& rest);
  Rest rest_from_node(Node node, const Rest& rest);
  Rest rest_from_look(const Look& look, const Rest& rest);
  Rest rest_from_ahead(const Item& item, const Rest& rest);
  Rest rest_from_repeat(const Item& item, Piece piece, const Rest& rest);
  Rest rest_from_endless(Piece piece, const Rest& rest);
  Rest joined(const Rest& first, const Rest& second);

  Node texts(Piece piece, size_t before, size_t after);
  Node tail(const Item& item, Piece piece, size_t from, size_t before, size_t after);
  Node repeated(Piece piece, uint32_t low, uint32_t high, size_t before, size_t after);
  Node endless(Piece piece, size_t before, size_t after);
  void close(Item& item);
  template <class First, class Second>
  Node in_turn(const First& first, bool first_looks_after, const Second& second,
               bool second_looks_before, size_t before, size_t after);
  // The next functions return the number of classes that a character can have before or after a
  // repetition of an item. They return 1 if no condition inside the item depends on this character.
  size_t classes_before(const Item& item) const { return item.looks_before ? before_.size() : 1; }
  size_t classes_after(const Item& item) const { return item.looks_after ? after_.size() : 1; }
  [[noreturn]] void refuse(const char* what) const;

  Expressions& expressions_;
  const Spell spell_;
  const std::string subject_;
  std::vector<Item> items_{Item{}};  // item 0 is unused
  // The classes of characters before and after a position. All conditions treat the characters of a
  // class in the same way.
  std::vector<CodePoints> before_, after_;
  Node any_texts_ = 0;  // matches all texts
  int depth_ = 0;
  std::map<Key, Node> known_;
  std::map<std::tuple<Node, Side, uint64_t>, Node> known_edges_;
};

// A Looks::Spell that writes a character in UTF-8.
inline Node in_utf8(Expressions& expressions, const CodePoints& points) {
  return expressions.characters(points);
}

}  // namespace dlm::compile
