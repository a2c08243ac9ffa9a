"""Training at cluster scale on paper: routing traces, a cost model, and replays through policies.

Planner, selection and memory code are those of training; only the clock is modelled. Every figure
made here is *simulated* and says so.
"""
