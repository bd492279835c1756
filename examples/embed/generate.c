/* Generates text from a bundle in C: generate BUNDLE NEW_TOKENS PROMPT [SCHEMA]
 * Prints the text after the prompt to stdout while it is generated. Then prints the number of
 * passes and the seconds to stderr. With a JSON Schema, the text is JSON that is valid against this
 * schema. README.md explains how to build this program. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlm_runtime.h"

/* Reads an integer that fits int32_t. Returns 0 if the text is something else. */
static int read_int32(const char* text, int32_t* value) {
  char* end = NULL;
  errno = 0;
  const long number = strtol(text, &end, 10);
  *value = (int32_t)number;
  return end != text && *end == '\0' && errno == 0 && *value == number;
}

static void report(dlm_status status, const char* sentence) {
  fprintf(stderr, "generate: %s: %s\n", dlm_status_name(status), sentence);
}

/* Prints the text that a step adds. This text consists of complete characters. If the text cannot
 * be written, returns 1, which ends the request. */
static int32_t on_step(void* user, const dlm_step* step) {
  FILE* out = user;
  return fwrite(step->text, 1, step->text_size, out) != step->text_size || fflush(out) != 0;
}

int main(int argc, char** argv) {
  dlm_request request; /* request.policy is NULL by default, which selects the default preset */
  dlm_request_init(&request, sizeof request);
  if (argc < 4 || argc > 5 || !read_int32(argv[2], &request.max_new_tokens) ||
      request.max_new_tokens < 0) {
    fprintf(stderr, "usage: generate BUNDLE NEW_TOKENS PROMPT [SCHEMA]\n");
    return 2;
  }
  request.prompt = argv[3];
  request.prompt_size = strlen(argv[3]);
  request.text = DLM_TEXT_STEPS;
  request.on_step = on_step;
  request.user = stdout;
  char message[1024];
  dlm_bundle* bundle = NULL;
  dlm_session* session = NULL;
  dlm_automaton* automaton = NULL;
  const dlm_result* result = NULL;
  dlm_status status = dlm_bundle_open(argv[1], NULL, message, sizeof message, &bundle);
  if (status == DLM_OK && argc == 5) {
    dlm_constraint constraint;
    dlm_constraint_init(&constraint, sizeof constraint);
    constraint.kind = DLM_CONSTRAINT_SCHEMA;
    constraint.content = argv[4];
    constraint.content_size = strlen(argv[4]);
    status = dlm_automaton_compile(bundle, &constraint, message, sizeof message, &automaton);
    request.constraint = automaton;
  }
  if (status == DLM_OK) status = dlm_session_create(bundle, message, sizeof message, &session);
  if (status != DLM_OK) report(status, message);
  if (status == DLM_OK) {
    status = dlm_session_generate(session, &request, &result);
    if (status != DLM_OK) report(status, dlm_session_last_error(session));
  }
  if (status == DLM_OK) {
    printf("\n");
    fprintf(stderr, "%d passes, %.3f s\n", (int)result->stats->nfe, result->stats->total_s);
  }
  dlm_automaton_destroy(automaton);
  dlm_session_destroy(session); /* the session must be destroyed before its bundle */
  dlm_bundle_destroy(bundle);
  return status == DLM_OK ? 0 : 1;
}
