// schedule BUNDLE PRESET AUTOMATON PROMPT... submits all prompts to a scheduler at the same time,
// and prints one answer per line. PRESET is the name of a preset, or - for the bundle's default
// preset. AUTOMATON is a file that `dlm-export compile` wrote, or - for no constraint.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"example.com/dlm"
)

func main() {
	if len(os.Args) < 5 {
		fmt.Fprintln(os.Stderr, "usage: schedule BUNDLE PRESET AUTOMATON PROMPT...")
		os.Exit(2)
	}
	if err := schedule(os.Args[1], os.Args[2], os.Args[3], os.Args[4:]); err != nil {
		fmt.Fprintln(os.Stderr, "schedule:", err)
		os.Exit(1)
	}
}

func schedule(path, preset, automaton string, prompts []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	bundle, err := dlm.Open(path, 0)
	if err != nil {
		return err
	}
	defer bundle.Close()
	var options dlm.Options
	if preset != "-" {
		if options.Policy, err = bundle.Preset(preset); err != nil {
			return err
		}
	}
	if automaton != "-" {
		if options.Constraint, err = dlm.OpenAutomaton(automaton); err != nil {
			return err
		}
		defer options.Constraint.Close()
	}
	scheduler, err := bundle.NewScheduler()
	if err != nil {
		return err
	}
	defer scheduler.Close()
	var jobs []*dlm.Job
	for _, prompt := range prompts {
		job, err := scheduler.SubmitText(prompt, options)
		if err != nil {
			return err
		}
		defer job.Close()
		jobs = append(jobs, job)
	}
	for _, job := range jobs {
		out, err := job.Wait(ctx)
		if err != nil {
			return err
		}
		fmt.Println(out.Text)
		fmt.Fprintf(os.Stderr, "%d passes, %s\n", out.Passes, out.Finish)
	}
	return nil
}
