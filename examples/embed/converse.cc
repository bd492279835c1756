// Answers chat messages in C++ with dlm_runtime.hpp: converse BUNDLE NEW_TOKENS [MESSAGE...]
// The program answers each MESSAGE, or each line of stdin if there is no MESSAGE. It prints each
// answer while the answer is generated. Then it submits all messages to a scheduler at the same
// time, and compares the new answers with the earlier ones. README.md explains how to build this
// program.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "dlm_runtime.hpp"

namespace {

namespace dlm = dlm_runtime;
using Lines = std::vector<std::string>;

Lines lines_of(int argc, char** argv) {
  if (argc > 3) return {argv + 3, argv + argc};
  Lines lines;
  for (std::string line; std::getline(std::cin, line);) lines.push_back(line);
  return lines;
}

// Makes a request that answers one message.
dlm::Request request_of(const std::string& line, std::int32_t max_new_tokens) {
  dlm::Request request;
  request.chat = {{"user", line}};
  request.max_new_tokens = max_new_tokens;
  return request;
}

// Answers the messages one after another, and prints each answer while it is generated.
Lines answers(const dlm::Bundle& bundle, const Lines& lines, std::int32_t max_new_tokens) {
  dlm::Session session(bundle);
  Lines out;
  for (const std::string& line : lines) {
    dlm::Request request = request_of(line, max_new_tokens);
    request.on_text = [](std::string_view piece) {
      return static_cast<bool>(std::cout << piece << std::flush);
    };
    const dlm::Result result = session.generate(request);
    out.push_back(result.text);
    std::cout << "\n  (" << result.stats.nfe << " passes, " << result.completion_tokens
              << " tokens)\n";
  }
  return out;
}

// Answers all messages at the same time, in shared passes. Returns the number of answers that
// differ from the earlier answers.
int differences(const dlm::Bundle& bundle, const Lines& lines, const Lines& before,
                std::int32_t max_new_tokens) {
  dlm::Scheduler scheduler(bundle);
  std::vector<dlm::Job> jobs;
  for (const std::string& line : lines)
    jobs.push_back(scheduler.submit(request_of(line, max_new_tokens)));
  std::thread passes([&] { scheduler.run(true); });
  passes.join();
  int count = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i) count += jobs[i].result().text != before[i];
  std::cout << jobs.size() << " requests in " << scheduler.stats().passes << " shared passes, "
            << count << " not as alone\n";
  return count;
}

}  // namespace

int main(int argc, char** argv) {
  const int new_tokens = argc > 2 ? std::atoi(argv[2]) : 0;
  if (new_tokens < 1) {
    std::cerr << "usage: converse BUNDLE NEW_TOKENS [MESSAGE...]\n";
    return 2;
  }
  try {
    const dlm::Bundle bundle(argv[1]);
    const Lines lines = lines_of(argc, argv);
    return differences(bundle, lines, answers(bundle, lines, new_tokens), new_tokens) == 0 ? 0 : 1;
  } catch (const dlm::Error& error) {
    std::cerr << "converse: " << dlm_status_name(error.status()) << ": " << error.what() << "\n";
    return 1;
  }
}
