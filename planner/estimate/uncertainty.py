def interval(metric, gpu, engine): return 0.8,1.25
