#include "compile/json/formats.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "compile/json/json_text.h"
#include "compile/regex/regex.h"

namespace dlm::compile {
namespace {

using std::string;

string many(const string& item, int low, int high) {
  return "(?:" + item + "){" + std::to_string(low) + "," + std::to_string(high) + "}";
}

// ---- Dates (RFC 3339) ----

// Returns a regular expression for dates in the years 0001 to 9999. Year 0 is left out, because
// Python's dates do not support it.
string date() {
  const string year = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)";
  const string fours = "(?:0[48]|[2468][048]|[13579][26])";
  return "(?:" + year +
         "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
         "|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}" +
         fours + "|" + fours + "00)-02-29)";
}

// Returns a regular expression for times. Leap seconds are left out, because few programs support
// them.
string time() {
  return "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
         "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
}

// Returns a regular expression for durations (RFC 3339, appendix A).
string duration() {
  const string n = "[0-9]+", second = n + "S", minute = n + "M(?:" + second + ")?",
               hour = n + "H(?:" + minute + ")?",
               clock = "T(?:" + hour + "|" + minute + "|" + second + ")", day = n + "D",
               month = n + "M(?:" + day + ")?", year = n + "Y(?:" + month + ")?";
  return "P(?:(?:" + day + "|" + month + "|" + year + ")(?:" + clock + ")?|" + clock + "|" + n +
         "W)";
}

// ---- Hosts ----

// Returns a regular expression for the labels of host names, with up to `most` characters. If
// `most` is 0, the length has no limit. A label is the part between two dots. Labels whose third
// and fourth characters are both "-" are left out. Such a label may be Punycode. Programs decode
// Punycode, and could reject the decoded label.
string label(int most) {
  const string end = "[A-Za-z0-9]", any = "[A-Za-z0-9-]";
  const auto more = [&](int before) {
    const string high = most > 0 ? std::to_string(most - before) : "";
    return end + "(?:" + any + "{0," + high + "}" + end + ")?";
  };
  return end + "(?:" + end + "|" + any + "(?:" + more(4) + "|-" + more(5) + "))?";
}

// If a string has a limited length, its automaton counts the characters from the start. The number
// of states would be far too large if the automaton also counted the characters of each label. So
// host names, mail addresses, and the scheme and authority of a URI are limited to this number of
// characters then. A label within this limit is never too long.
constexpr int kMostCounted = 63;

Node limited(Expressions& e, Node node, bool is_counted) {
  return is_counted ? e.both(node, regex(e, many(".", 1, kMostCounted))) : node;
}

// Returns a regular expression for host names of at least `fewest` labels and at most 253
// characters (RFC 1123, RFC 5890). A label is the part between two dots. If `is_counted` is true,
// limited() must limit the length.
//
// An automaton that counts the characters of the whole name would have too many states. So the
// function allows only host names in one of these three forms:
//
// - up to three labels of at most 63 characters
// - three labels of at most 63 characters, and a fourth label of at most 61 characters
// - up to eight labels of at most 30 characters
string host(int fewest, bool is_counted) {
  if (is_counted) return "(?:" + label(0) + "\\.){" + std::to_string(fewest - 1) + ",}" + label(0);
  const string long_label = label(63) + "\\.";
  return "(?:" + many(long_label, fewest - 1, 2) + label(63) + "|" + many(long_label, 3, 3) +
         label(61) + "|" + many(label(30) + "\\.", fewest - 1, 7) + label(30) + ")";
}

// Letters of common scripts that are written from left to right. IDNA 2008 allows these letters
// unchanged. A label may have at most 63 characters after conversion to Punycode. Twelve of these
// letters always fit into this limit.
const char kLetters[] =
    "a-z0-9\\u{DF}-\\u{F6}\\u{F8}-\\u{FF}\\u{3B1}-\\u{3C9}\\u{430}-\\u{45F}\\u{3041}-\\u{3096}"
    "\\u{30A1}-\\u{30FA}\\u{4E00}-\\u{9FA5}\\u{AC00}-\\u{D7A3}";

string international_host(int fewest, bool is_counted) {
  if (is_counted) return host(fewest, true);
  const string name = "[" + string(kLetters) + "]{1,12}";
  return "(?:" + host(fewest, false) + "|" + many(name + "\\.", fewest - 1, 3) + name + ")";
}

const char kByte[] = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";

string ipv4() { return string(kByte) + "(?:\\." + kByte + "){3}"; }

// Returns a regular expression for IPv6 addresses (RFC 3986). Zone identifiers are left out.
string ipv6() {
  const string group = "[0-9A-Fa-f]{1,4}", part = "(?:" + group + ":)";
  const string last = "(?:" + group + ":" + group + "|" + ipv4() + ")";
  string all = "(?:" + part + "{6}" + last + "|::" + part + "{5}" + last;
  for (int before = 0; before < 7; ++before) {
    all += "|(?:" + part + "{0," + std::to_string(before) + "}" + group + ")?::";
    if (before < 5)
      all += part + "{" + std::to_string(4 - before) + "}" + last;
    else if (before == 5)
      all += group;
  }
  return all + ")";
}

// ---- Mail ----

// Returns mail addresses in the format of RFC 5321. The part before the @ consists of words that
// are separated by dots. This part is at most `most` characters long. Quoted names are left out.
Node mail(Expressions& e, const string& letters, int most, const string& host_name) {
  const string word = "[" + letters + "!#$%\\&'*+/=?\\^_`{|}\\~-]+";
  const Node words = regex(e, word + "(?:\\." + word + ")*");
  return e.sequence(e.both(words, regex(e, many(".", 1, most))), regex(e, "@" + host_name));
}

// ---- URIs (RFC 3986, RFC 3987) ----

// Returns URIs or, if `is_reference` is true, also relative references, including the empty
// reference. `letters` contains the allowed letters outside ASCII.
Node uri(Expressions& e, const string& letters, bool is_reference, bool is_counted) {
  const string escape = "%[0-9A-Fa-f]{2}";
  const string plain = "A-Za-z0-9._\\~!$\\&'()*+,;=\\-" + letters;
  const string character = "(?:[" + plain + ":@]|" + escape + ")";
  const string segments = "(?:/" + character + "*)*";
  const string more = "(?:[" + plain + ":@/?]|" + escape + ")*";
  const string tail = "(?:\\?" + more + ")?(?:#" + more + ")?";
  const string scheme = "(?:[A-Za-z][A-Za-z0-9+.-]*:)";
  const string port = ":(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3})";
  const string name = letters.empty() ? host(1, is_counted) : international_host(1, is_counted);
  const string start = scheme + (is_reference ? "?" : "") + "//(?:[A-Za-z0-9._\\~-]+@)?(?:" + name +
                       "|\\[" + ipv6() + "\\])(?:" + port + ")?";
  const string path = "/(?:" + character + "+" + segments + ")?";
  string others = scheme + "(?:" + path + "|" + character + "+" + segments + ")";
  // The first segment of a relative path must not contain a colon. Otherwise programs would
  // interpret the text before the colon as a scheme.
  if (is_reference)
    others += "|" + path + "|(?:(?:[" + plain + "@]|" + escape + ")+" + segments + ")?";
  return e.either(e.sequence(limited(e, regex(e, start), is_counted), regex(e, segments + tail)),
                  regex(e, "(?:" + others + ")" + tail));
}

const char kBeyondAscii[] =
    "\\u{A1}-\\u{1FFF}\\u{2070}-\\u{D7FF}\\u{F900}-\\u{FDCF}\\u{FDF0}-\\u{FEFE}";

// Returns a regular expression for URI templates (RFC 6570). Escapes in the names of variables are
// left out.
string uri_template() {
  const string name = "[A-Za-z0-9_]+(?:\\.[A-Za-z0-9_]+)*";
  const string variable = name + "(?::[1-9][0-9]{0,2}|\\*)?";
  return "(?:[!#-$\\&(-;=?-\\[\\]_a-z\\~]|%[0-9A-Fa-f]{2}|\\{[+#./;?\\&]?" + variable + "(?:," +
         variable + ")*\\})*";
}

// Returns a regular expression for the format "regex". It matches simple regular expressions that
// all regex engines accept. In these expressions, groups are nested at most twice, and ranges
// contain only letters or only digits.
string expression() {
  // JSON writes each backslash as two backslashes.
  const string plain = "(?:[A-Za-z0-9 _:;,<>@%=!'/`.-]|\\\\\\\\[dDwWsS.*+?()\\[\\]{}|^$/])";
  const string set = "\\[\\^?(?:[a-z0-9A-Z_ ,:;.@/]|a-z|A-Z|0-9|\\\\\\\\[dws])+\\]";
  const string counts = "(?:[*+?]|\\{[1-9][0-9]?,?\\})?";
  const string simple = "(?:(?:" + plain + "|" + set + ")" + counts + ")*";
  const string inner = "(?:\\((?:\\?:)?" + simple + "(?:\\|" + simple + ")*\\)" + counts + ")";
  const string part = "(?:(?:" + plain + "|" + set + ")" + counts + "|" + inner + ")*";
  const string outer = "(?:\\((?:\\?:)?" + part + "(?:\\|" + part + ")*\\)" + counts + ")";
  const string all = "(?:(?:" + plain + "|" + set + ")" + counts + "|" + outer + ")*";
  return "\\^?" + all + "(?:\\|" + all + ")*\\$?";
}

// Returns JSON pointers (RFC 6901). A pointer may contain any characters, but the characters ~ and
// / are escaped.
Node pointer(Expressions& e) {
  const Node escape = e.sequence(e.bytes("~"), e.either(e.bytes("0"), e.bytes("1")));
  const Node letter = spelled(e, complement({{'/', '/'}, {'~', '~'}}));
  return e.repeat(e.sequence(e.bytes("/"), e.repeat(e.either(letter, escape), 0, kUnbounded)), 0,
                  kUnbounded);
}

constexpr std::string_view kNames[] = {"date",          "date-time",
                                       "duration",      "email",
                                       "hostname",      "idn-email",
                                       "idn-hostname",  "ipv4",
                                       "ipv6",          "iri",
                                       "iri-reference", "json-pointer",
                                       "regex",         "relative-json-pointer",
                                       "time",          "uri",
                                       "uri-reference", "uri-template",
                                       "uuid"};

string written(std::string_view name) {
  if (name == "date") return date();
  if (name == "time") return time();
  if (name == "date-time") return date() + "T" + time();
  if (name == "duration") return duration();
  if (name == "ipv4") return ipv4();
  if (name == "ipv6") return ipv6();
  if (name == "uri-template") return uri_template();
  if (name == "regex") return expression();
  return "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}";  // the format "uuid"
}

}  // namespace

bool is_format(std::string_view name) {
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

Node format_in_string(Expressions& e, std::string_view name, bool is_counted) {
  const auto ascii_email = [&] { return mail(e, "A-Za-z0-9", 64, host(2, is_counted)); };
  if (name == "email") return limited(e, ascii_email(), is_counted);
  // A letter has at most three bytes in UTF-8. So 21 letters fit into the 64 bytes that are allowed
  // before the @.
  if (name == "idn-email") {
    const Node others = mail(e, "A-Z" + string(kLetters), 21, international_host(2, is_counted));
    return limited(e, e.either(ascii_email(), others), is_counted);
  }
  if (name == "hostname") return limited(e, regex(e, host(1, is_counted)), is_counted);
  if (name == "idn-hostname")
    return limited(e, regex(e, international_host(1, is_counted)), is_counted);
  if (name == "json-pointer") return pointer(e);
  if (name == "relative-json-pointer")
    // A relative JSON pointer starts with a number. This expression allows a 0 only as the last
    // digit of the number, because the validator jsonschema accepts no digit after a 0.
    return e.sequence(regex(e, "0|[1-9]{1,8}0?"), e.either(e.bytes("#"), pointer(e)));
  if (name == "uri" || name == "uri-reference") return uri(e, "", name != "uri", is_counted);
  if (name == "iri" || name == "iri-reference")
    return uri(e, kBeyondAscii, name != "iri", is_counted);
  return regex(e, written(name));
}

}  // namespace dlm::compile
