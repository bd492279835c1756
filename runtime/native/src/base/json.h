// A strict JSON reader (RFC 8259) for text that may be damaged or hostile.
//
// It also rejects byte order marks, invalid UTF-8, unpaired surrogates, numbers that overflow a
// double, and duplicate keys. It rejects an escaped NUL, because strings become C strings. Text
// longer, or nested deeper, than the caller's limits is rejected too. Every failure throws
// Error(DLM_BAD_BUNDLE). Syntax errors start with "line N: ". If a value has the wrong type or
// range, the message starts with the path of the value, for example `denoiser.layers: expected an
// integer in 1..65536, found "x"`. Text quoted in messages is escaped and cut to 60 characters.
//
// A value takes about 120 bytes, so reading n bytes of text may take 100 n bytes of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace dlm::json {

constexpr int kMaxDepth = 64;

// `text` as messages quote it: in double quotes, with non-ASCII and control characters escaped, cut
// to 60 characters.
std::string quoted(std::string_view text);

class Value {
 public:
  enum class Kind : uint8_t { null, boolean, number, string, array, object };

  Value() = default;
  Value(Value&&) = default;
  Value& operator=(Value&&) = default;
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;

  Kind kind() const { return kind_; }

  // key() is the key of an object's member, and "" for all other values. line() is the line where
  // the value starts, counted from 1.
  const std::string& key() const { return key_; }
  int32_t line() const { return line_; }

  // The value's path for messages, such as presets[0].block_length.
  std::string path() const;
  // Throws an error "<path>: <reason>". For checks in the caller's code.
  [[noreturn]] void refuse(const std::string& reason) const;

  // These return the value as the named type. They throw if the value has another type.
  bool boolean() const;
  double number(double low, double high) const;      // from low to high, both included
  int64_t integer(int64_t low, int64_t high) const;  // written without fraction and exponent
  const std::string& string() const;
  const std::string& written() const { return text_; }  // text of a number, as written in the file
  const std::vector<Value>& elements() const;           // elements of an array
  const std::vector<Value>& members() const;  // members of an object, in file order; each knows its
                                              // key()

  // The member of an object with this key. find returns nullptr if the key is missing; the others
  // throw.
  const Value* find(std::string_view key) const;
  const Value& at(std::string_view key) const;
  bool boolean(std::string_view key) const { return at(key).boolean(); }
  int64_t integer(std::string_view key, int64_t low, int64_t high) const {
    return at(key).integer(low, high);
  }
  const std::string& string(std::string_view key) const { return at(key).string(); }
  const std::vector<Value>& array(std::string_view key) const { return at(key).elements(); }
  const Value& object(std::string_view key) const;

  // The value as canonical text: keys are sorted, there is no white space, and integers are
  // decimal. The top-level member `without` is left out. Throws for fractions, and for strings with
  // characters other than printable ASCII. Equals Python's json.dumps(value, sort_keys=True,
  // separators=(",", ":")).
  std::string canonical(std::string_view without = {}) const;

  // Throws for the first member whose key is not in `known`. Unknown keys must not be ignored,
  // because they could change the meaning of the file.
  void refuse_unknown(const std::vector<std::string_view>& known) const;

 private:
  friend class Reader;
  void append_canonical(std::string& out, std::string_view without) const;
  std::string found() const;
  [[noreturn]] void expected(const std::string& what) const;

  Kind kind_ = Kind::null;
  bool truth_ = false;
  bool is_integer_ = false;
  int32_t line_ = 0;
  int64_t integer_ = 0;
  double number_ = 0;
  const Value* parent_ = nullptr;  // set when the tree is complete and no longer moves; the root
                                   // owns the tree
  std::string key_;
  std::string text_;  // value of a string; text of a number, as written
  std::vector<Value> items_;
};

// Reads text that consists of exactly one value. max_bytes limits the length of the text, and
// max_depth its nesting.
std::unique_ptr<const Value> parse(std::string_view text, size_t max_bytes,
                                   int max_depth = kMaxDepth);

}  // namespace dlm::json
